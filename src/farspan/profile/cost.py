"""Estimates the cost of running a module from its parameters alone.

An estimate: it orders modules well enough to cut a model into stages, and measured costs replace it. The unit is one
multiply-add per position, where a position is what a Linear sees once (a token).

    Linear, RNN, attention, unknown    number of parameters: each weight is used in one multiply-add per position
    norm                               number of parameters: small, as it should be
    Embedding                          0: a gather reads one row per position
    Conv2d, Conv3d                     weights * positions: each weight is used at every position of the feature map
    Conv1d; Conv of patches            weights: a sequence, or patches, are positions already

Without running the model the size of a feature map is unknown. But those who design convolutional networks double the
channels where they halve the resolution, so that every layer costs about the same (K. He et al., Deep residual learning
for image recognition, 2015, section 3.3): positions are taken as 16 * (widest / channels) ** 2, that is a last map of
4 x 4 at the widest layer of the model. In ResNet-50 this makes all blocks of 3 x 3 convolutions equal, as they are.

Not seen: the score matrix of attention (no parameters, grows with the sequence, equal in every block), experts that a
router leaves idle, modules called more than once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

__all__ = [
    "PARAMETER_LISTS",
    "children_with_parameters",
    "is_indivisible",
    "module_cost",
    "narrow_sides",
    "widest_convolution",
]

_POSITIONS_AT_THE_WIDEST = 16
_MOST_POSITIONS = 16 * 1024
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: whoever has them uses their parameters."""
# Their code uses the parameters of their children directly, or they have children for other purposes (parametrization).
_INDIVISIBLE = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Conv1d,
    nn.ConvTranspose1d,
    *_CONVOLUTIONS,
)


def module_cost(module: nn.Module, *, widest: int) -> float:
    """Estimated cost of one call of `module`, all its children included, once each.

    Args:
        module: Any module; tied parameters count wherever they are used.
        widest: `widest_convolution` of the whole model.
    """
    return sum(_own_cost(part, widest) for part in module.modules())


def widest_convolution(model: nn.Module) -> int:
    """Returns the most channels of any convolution in `model`; 0 if there is none."""
    return max((_channels(part) for part in model.modules() if isinstance(part, _CONVOLUTIONS)), default=0)


def narrow_sides(model: nn.Module) -> tuple[list[float], list[float]]:
    """Returns how many numbers each matrix takes or gives for a position, whichever is less; and of the weight of each
    convolution, the same.

    Example:
        >>> narrow_sides(nn.Sequential(nn.Linear(8, 2), nn.Conv1d(4, 6, 3)))
        ([2.0], [4.0])
    """
    widest, seen = widest_convolution(model), set[int]()
    matrices: list[float] = []
    kernels: list[float] = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen or parameter.dim() < 2:
                continue
            seen.add(id(parameter))
            if parameter.dim() == 2:
                matrices.append(float(min(parameter.shape)))
            elif isinstance(module, (nn.Conv1d, nn.ConvTranspose1d, *_CONVOLUTIONS)):
                kernels.append(min(module.in_channels, module.out_channels) * _positions(module, widest))
    return matrices, kernels


def children_with_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the named children of `module` that hold a parameter somewhere."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is not None:
            yield name, child


def is_indivisible(module: nn.Module) -> bool:
    """Returns whether `module` can only be placed as a whole: its parts are not called, or hold no parameters."""
    if isinstance(module, PARAMETER_LISTS):
        return False
    return isinstance(module, _INDIVISIBLE) or next(children_with_parameters(module), None) is None


def _own_cost(module: nn.Module, widest: int) -> float:
    """Returns the cost of the parameters that `module` holds directly."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 0.0
    numel = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return float(numel * _positions(module, widest))


def _positions(module: nn.Module, widest: int) -> float:
    """Returns how often each weight is used for one position."""
    if not isinstance(module, _CONVOLUTIONS) or _takes_patches(module):
        return 1.0
    return float(min(_POSITIONS_AT_THE_WIDEST * (max(widest, 1) / _channels(module)) ** 2, _MOST_POSITIONS))


def _takes_patches(module: nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d) -> bool:
    """Returns whether no two positions share an input, as in the patch embedding of a vision transformer."""
    return math.prod(module.kernel_size) > 1 and all(
        stride >= size for stride, size in zip(module.stride, module.kernel_size, strict=True)
    )


def _channels(module: nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d | nn.ConvTranspose3d) -> int:
    return max(module.in_channels, module.out_channels)
