"""What the passes of `elementwise` refuse."""

from collections.abc import Mapping

from torch import Tensor

from layerwise.foundations.errors import InputError, describe


def check_whole(X: Tensor, name: str, transposed: bool = False) -> None:
    """Refuse a stack whose matrices do not each lie in one piece, or their transposes if they may be `transposed`."""
    if not X.is_contiguous() and len(X) and not (X[0].is_contiguous() or (transposed and X[0].mT.is_contiguous())):
        raise InputError(
            describe(
                f"{name} of shape {tuple(X.shape)} with strides {X.stride()}",
                "a stack [K, O, I] whose last two axes are contiguous (K may be strided)",
                "call `.contiguous()`",
            )
        )


def check_means(mean: Tensor, new: Tensor) -> None:
    """Refuse means and new values that do not belong together."""
    fits = mean.ndim == new.ndim and mean.ndim in (2, 3) and len(mean) == len(new)
    if not fits or any(m > n for m, n in zip(new.shape, mean.shape, strict=True)):
        raise InputError(
            describe(
                f"means of shape {tuple(mean.shape)} and new values of {tuple(new.shape)}",
                "two stacks of matrices or of vectors, the new ones no larger",
                "cut the new values, or begin with larger means",
            )
        )
    check_whole(mean, "mean")
    if new.shape[-1] > 1 and new.stride(-1) != 1:
        raise InputError(describe(f"new with strides {new.stride()}", "a last stride of 1", "call `.contiguous()`"))


def check_alike(first: Tensor, others: Mapping[str, Tensor]) -> None:
    """Refuse stacks of unlike shapes, or whose matrices do not each lie in one piece."""
    check_whole(first, "the stack")
    for name, X in others.items():
        check_whole(X, name)
        if X.shape != first.shape:
            raise InputError(
                describe(f"{name} of shape {tuple(X.shape)}", f"the shape {tuple(first.shape)}", "pad or cut it")
            )
