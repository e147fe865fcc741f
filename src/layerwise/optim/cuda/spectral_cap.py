"""The bound on the largest singular value of an update (`step.spectral_cap`), by kernels where there are some."""

from jaxtyping import Float
from torch import Tensor

from layerwise.optim.backend import norms
from layerwise.optim.cuda.triton import spectral_cap as triton_spectral_cap
from layerwise.optim.cuda.triton.device import available
from layerwise.optim.rule import tensors
from layerwise.optim.step import spectral_cap
from layerwise.optim.step.update import Part


def capped(part: Part, C: Float[Tensor, "K O I"]) -> tuple[Float[Tensor, "K O I"], Float[Tensor, "K"]]:
    """Directions that are cut, in place where nobody else has them; and the norms that they had before."""
    stack = part.stack
    sides = (stack.shape.own_outputs, stack.shape.own_inputs)
    share = spectral_cap.most_of_norm(sides)
    if stack.requires.flat_spectrum or share >= 1:
        return C, norms(C)
    if not (available(C.device) and triton_spectral_cap.fits(C)):
        size = norms(C)
        return spectral_cap.capped(C, size, sides), size
    C = C.clone() if _is_read_again(part, C) else C
    return C, triton_spectral_cap.cap_(C, share)


def _is_read_again(part: Part, C: Tensor) -> bool:
    """Whether the direction is the gradient or lies in the state, as that of a rule with nothing to multiply by."""
    place = C.untyped_storage().data_ptr()
    others = (part.grad, part.handed, *tensors(part.stack.state).values())
    return any(X.untyped_storage().data_ptr() == place for X in others if isinstance(X, Tensor))
