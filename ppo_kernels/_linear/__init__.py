"""From hidden states to log-probabilities and losses, a chunk of tokens at a time.

`head` multiplies by the LM head and collects gradients, `rows` says what the implementations must
do with a chunk of logits, and one file per operator joins the two.
"""
