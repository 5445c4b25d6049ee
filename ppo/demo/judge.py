"""An independent judge of the demo: VADER, a lexicon with rules (Hutto & Gilbert 2014)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    with warnings.catch_warnings():
        # vaderSentiment 3.3.2 opens its lexicon with codecs.open, deprecated since Python 3.14.
        warnings.simplefilter("ignore", DeprecationWarning)
        return SentimentIntensityAnalyzer()


def vader(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Score the sentiment of each response; what the prompt says does not count.

    Args:
        prompts: texts, one per response; only their number is used.
        responses: texts to score.

    Returns:
        VADER's compound score of each response, in [-1, 1]: above 0.05 reads as positive, below
        -0.05 as negative.

    Raises:
        ValueError: prompts and responses differ in number.

    Source: Hutto & Gilbert, VADER, ICWSM 2014, https://doi.org/10.1609/icwsm.v8i1.14550.
    """
    if len(prompts) != len(responses):
        raise ValueError(
            f"responses must match prompts in number, got {len(responses)} for {len(prompts)}"
        )
    analyzer = _analyzer()
    return [float(analyzer.polarity_scores(text)["compound"]) for text in responses]
