"""The option that writes the gradient into the logits' own memory."""

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import token_logprobs, token_logprobs_and_entropy

TOKENS = torch.tensor([[0, 3, -100], [6, 1, 2]])
MODIFIED = "modified by an inplace operation"


@pytest.fixture(params=["torch"])
def impl(request):
    """Those that have the option and run everywhere."""
    return request.param


def model(dtype=torch.float32):
    """A leaf, and logits that depend on it as a model's output does."""
    leaf = torch.randn(2, 3, 7, requires_grad=True)
    return leaf, (leaf * 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_same_gradient_in_the_memory_of_the_logits(impl, dtype, temperature):
    _, logits = model(dtype)
    copy = logits.detach().clone().requires_grad_()
    for z, inplace in ((logits, True), (copy, False)):
        logprobs, entropy = token_logprobs_and_entropy(
            z, TOKENS, temperature=temperature, inplace_backward=inplace, impl=impl
        )
        (grad,) = torch.autograd.grad((logprobs + 0.1 * entropy).sum(), z, retain_graph=True)
        if inplace:
            assert grad.data_ptr() == logits.data_ptr()
            written = grad.clone()
    assert torch.equal(written, grad)


def test_gradient_reaches_the_leaf(impl):
    leaf, logits = model()
    token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl).sum().backward()
    (want,) = torch.autograd.grad(token_logprobs(leaf * 2, TOKENS, impl=impl).sum(), leaf)
    assert_close(leaf.grad, want, rtol=0, atol=1e-6)


def test_padding_columns_and_masked_rows_become_zero(impl):
    _, logits = model()
    logprobs = token_logprobs(logits, TOKENS.clamp(max=4), vocab_size=5, inplace_backward=True)
    (grad,) = torch.autograd.grad(logprobs.sum(), logits)
    assert (grad[..., 5:] == 0).all()
    assert (grad[0, 2] == 0).all()
    assert grad.data_ptr() == logits.data_ptr()


def test_second_backward_fails(impl):
    _, logits = model()
    loss = token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl).sum()
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match=MODIFIED):
        torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("consumer", [torch.square, lambda z: z.softmax(-1) * z])
def test_another_consumer_of_the_logits_fails_instead_of_being_wrong(impl, consumer):
    # Liger-Kernel#272: upstream gradients were wrong, without an error
    _, logits = model()
    other = consumer(logits).sum()
    loss = token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl).sum()
    torch.autograd.grad(loss, logits)
    with pytest.raises(RuntimeError, match=MODIFIED):
        torch.autograd.grad(other, logits)


def test_logits_made_by_an_operation_that_keeps_its_output_fail(impl):
    x = torch.randn(2, 3, 7, requires_grad=True)
    logits = x.exp()  # its backward pass needs the logits
    loss = token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl).sum()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_logits_changed_before_backward_fail(impl):
    _, logits = model()
    loss = token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl).sum()
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_leaves_and_their_views_are_refused(impl):
    leaf = torch.randn(2, 3, 7, requires_grad=True)
    for logits in (leaf, leaf[:, :], leaf.transpose(0, 1)):
        tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        with pytest.raises(ValueError, match="are, or view, a leaf of the graph"):
            token_logprobs(logits, tokens, inplace_backward=True, impl=impl)


def test_expanded_logits_are_refused(impl):
    logits = (torch.randn(1, 3, 7, requires_grad=True) * 2).expand(2, 3, 7)
    with pytest.raises(ValueError, match=r"expanded tensor with strides \[0, 7, 1\]"):
        token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl)


def test_second_derivatives_are_refused(impl):
    _, logits = model()
    loss = token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl).sum()
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_the_reference_has_no_such_option():
    _, logits = model()
    with pytest.raises(ValueError, match="inplace_backward needs impl='triton' or impl='torch'"):
        token_logprobs(logits, TOKENS, inplace_backward=True, impl="reference")


def test_no_gradient_no_change(impl):
    leaf = torch.randn(2, 3, 7, requires_grad=True)
    before = leaf.detach().clone()
    with torch.no_grad():
        token_logprobs(leaf, TOKENS, inplace_backward=True, impl=impl)
    token_logprobs(leaf.detach(), TOKENS, inplace_backward=True, impl=impl)
    _, logits = model()
    kept = logits.detach().clone()
    token_logprobs(logits, TOKENS, inplace_backward=True, impl=impl)
    assert torch.equal(leaf, before)
    assert torch.equal(logits, kept)
