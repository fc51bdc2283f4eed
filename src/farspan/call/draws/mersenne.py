r"""torch's CPU generator (mt19937): a state that is any number of draws ahead, drawn only where that is cheaper.

A state is 624 words, of which the first `position` have been drawn, and perhaps the second of two normal numbers, which
torch keeps for later. The words follow from each other linearly over GF(2), and so do the numbers drawn, which are
the words with their bits mixed. With P the characteristic polynomial, of degree 19937, and y[i] the i-th draw,

    x^N mod P = sum of c[j] x^j          y[N + i] = xor of y[j + i] over all j with c[j] = 1

    draw          N numbers, two at a time, into a scratch tensor         1.7 to 2 ns each
    jump          20,561 numbers, then 624 exclusive-ors of 10,000        0.8 ms; the polynomial, once for each N, 30 ms

Source: Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer, Efficient Jump Ahead for F2-Linear Random Number Generators
(2008), with the sliding windows grouped by five coefficients: windows of equal ones are added up once for all five.
"""

from __future__ import annotations

import functools
from collections import OrderedDict

import numpy as np
import torch

from farspan.torch_private import without_any_mode

__all__ = [
    "BLOCK",
    "advanced",
    "cached_normals",
    "distance",
    "is_same_state",
    "keeps_the_same",
    "position_of",
    "with_cached_normals",
]

BLOCK = 624
"""Words of a state."""
_LAG = 397
_DEGREE = 19937
_GROUP = 5
"""Coefficients that share their windows."""
_LEFT, _NEXT, _WORDS, _TAIL = 8, 16, 24, 24 + 8 * BLOCK
"""Offsets of a state's parts in its bytes: the number of words left, the next word, the words, cached normal
numbers."""
_HAS_DOUBLE, _HAS_FLOAT = _TAIL + 24, _TAIL + 36
_JUMP_FROM = 3 << 17
"""From this many draws on a jump costs less than drawing."""
_CHUNK = 1 << 14
_KEPT = 64
"""Polynomials, of 40 KB each."""
_asked: OrderedDict[int, bool] = OrderedDict()


def advanced(state: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the state after `count` more draws of 32 bits; cached normal numbers stay."""
    if count == 0:
        return state
    with without_any_mode():
        if count >= _JUMP_FROM and _is_worth_a_jump(count):
            return _jumped(state, count)
        generator = torch.Generator()
        generator.set_state(state)
        _draw(generator, count)
        return generator.get_state()


def position_of(state: torch.Tensor) -> int:
    """Returns how many words of its block have been drawn, 1 to 624 (as many when it has just been seeded)."""
    return BLOCK + 1 - int(state.numpy()[_LEFT : _LEFT + 4].view(np.int32)[0])


def cached_normals(state: torch.Tensor) -> int:
    """Returns which normal numbers it keeps for later: 0 none, 1 a double, 2 a float, 3 both."""
    content = state.numpy()
    return int(content[_HAS_DOUBLE] != 0) + 2 * int(content[_HAS_FLOAT] != 0)


def with_cached_normals(state: torch.Tensor, cached: int) -> torch.Tensor:
    """Returns the same, but for the normal numbers that it keeps (of no meaning)."""
    content = state.numpy().copy()
    content[_TAIL + 8 : _TAIL + 16] = np.array([0.5 * (cached & 1)]).view(np.uint8)  # torch keeps zero for none
    content[_HAS_DOUBLE], content[_HAS_FLOAT] = cached & 1, cached >> 1
    return torch.from_numpy(content)


def is_same_state(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether the two states will give the same numbers."""
    return one.numpy()[_LEFT:].tobytes() == other.numpy()[_LEFT:].tobytes()


def keeps_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether their cached normal numbers are the same, bit for bit."""
    return one.numpy()[_TAIL:].tobytes() == other.numpy()[_TAIL:].tobytes()


def distance(before: torch.Tensor, after: torch.Tensor, limit: int) -> int | None:
    """Returns how many draws lie between two states; None if they are more than `limit`."""
    with without_any_mode():
        wanted = _words(after)
        first = BLOCK - position_of(before)
        """The draw at which the next block begins."""
        if np.array_equal(_words(before), wanted):
            return position_of(after) - position_of(before)
        target = _tempered(wanted)
        generator = torch.Generator()
        generator.set_state(before)
        _draw(generator, first)
        drawn, size = first, 4 * BLOCK
        while drawn <= limit:
            block = _draws(generator, size).reshape(-1, BLOCK)
            for number in np.nonzero(block[:, 0] == target[0])[0]:
                if np.array_equal(block[number], target):
                    return drawn + int(number) * BLOCK + position_of(after)
            drawn += size
            size = min(4 * size, 512 * BLOCK)
    return None


def _words(state: torch.Tensor) -> np.ndarray:
    return state.numpy()[_WORDS:_TAIL].view(np.uint64).astype(np.uint32)


def _draw(generator: torch.Generator, count: int) -> None:
    """Let `generator` draw and forget."""
    if count % 2:
        torch.empty(1, dtype=torch.int32).random_(generator=generator)
    pairs = torch.empty(min(count // 2, _CHUNK), dtype=torch.int64)
    for begin in range(0, count // 2, _CHUNK):
        _random_pairs(pairs[: count // 2 - begin], generator)


def _random_pairs(pairs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill `pairs` with 64 random bits each: two draws, at less than the cost of two of 32 bits."""
    return pairs.random_(-(2**63), None, generator=generator)  # type: ignore[call-overload]


def _draws(generator: torch.Generator, count: int) -> np.ndarray:
    """Returns the next `count` numbers, an even count."""
    pairs = _random_pairs(torch.empty(count // 2, dtype=torch.int64), generator)
    halves = pairs.numpy().view(np.uint32).reshape(-1, 2)
    first, second = (1, 0) if np.little_endian else (0, 1)
    found = np.empty(count, np.uint32)
    found[0::2], found[1::2] = halves[:, first], halves[:, second]
    return found


# The jump.


def _is_worth_a_jump(count: int) -> bool:
    """Returns the second time that one goes as far: the polynomial costs as much as drawing some millions of
    numbers."""
    is_known = _asked.pop(count, False) or count >= 64 * _JUMP_FROM
    _asked[count] = True
    while len(_asked) > 4 * _KEPT:
        _asked.popitem(last=False)
    return is_known


def _jumped(state: torch.Tensor, count: int) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    groups, members = _windows_of(count - BLOCK)
    draws = _draws(generator, _DEGREE + BLOCK + 2 * _GROUP - (_DEGREE + BLOCK) % 2)
    windows = np.lib.stride_tricks.sliding_window_view(draws, BLOCK + _GROUP - 1)[::_GROUP]
    sums = np.stack([np.bitwise_xor.reduce(windows[rows], axis=0) for rows in groups])
    last = np.zeros(BLOCK, np.uint32)
    for number, rows in enumerate(members):
        last ^= np.bitwise_xor.reduce(sums[rows, number : number + BLOCK], axis=0)
    position = (position_of(state) + count - 1) % BLOCK + 1
    words = _next_words(_untempered(last), BLOCK - position)
    content = state.numpy().copy()
    content[_WORDS:_TAIL] = words.astype(np.uint64).view(np.uint8)
    content[_LEFT : _LEFT + 4] = np.array([BLOCK + 1 - position], np.int32).view(np.uint8)
    content[_NEXT : _NEXT + 8] = np.array([position], np.uint64).view(np.uint8)
    return torch.from_numpy(content)


@functools.lru_cache(_KEPT)
def _windows_of(power: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """x^power mod P, its coefficients in groups of five.

    Returns:
        For each value of five coefficients that occurs, but 0, the numbers of the groups that have it; and for each of
        the five the values that contain it, by their order in the first list.
    """
    digits = np.frombuffer(_power_of_x(power).to_bytes(_DEGREE // 8 + 1, "little"), np.uint8)
    bits = np.unpackbits(digits, bitorder="little", count=(_DEGREE // _GROUP + 1) * _GROUP)
    values = bits.reshape(-1, _GROUP) @ (1 << np.arange(_GROUP, dtype=np.uint8))
    found = [value for value in range(1, 1 << _GROUP) if value in values]
    return (
        [np.nonzero(values == value)[0] for value in found],
        [np.array([i for i, value in enumerate(found) if value >> number & 1], int) for number in range(_GROUP)],
    )


def _power_of_x(power: int) -> int:
    """x^power mod P, as the bits of a number: square and multiply."""
    low = 0
    while power >> low >= _DEGREE:
        low += 1
    found = 1 << (power >> low)
    for bit in range(low - 1, -1, -1):
        found = _reduced(_squared(found) << (power >> bit & 1))
    return found


def _squared(polynomial: int) -> int:
    """Squares a polynomial over GF(2), where the bits only move apart."""
    digits = polynomial.to_bytes(_DEGREE // 8 + 1, "little")
    return int.from_bytes(_APART[np.frombuffer(digits, np.uint8)].tobytes(), "little")


_APART = np.array(
    [sum((byte >> bit & 1) << 2 * bit for bit in range(8)) for byte in range(256)], np.dtype("<u2")
)  # fmt: skip


def _reduced(polynomial: int) -> int:
    while True:
        high = polynomial >> _DEGREE
        if not high:
            return polynomial
        polynomial ^= high << _DEGREE
        for term in _terms():
            polynomial ^= high << term


@functools.cache
def _terms() -> tuple[int, ...]:
    """Returns the powers of x in P below its degree (Matsumoto and Nishimura, Mersenne Twister, 1998, appendix A)."""
    matrix = 0x9908B0DF
    first = _sum(BLOCK, _LAG)
    second = _sum(BLOCK - 1, _LAG - 1)
    powers = [1]
    for _ in range(31):
        powers.append(_product(powers[-1], second))
    found = _product(first, powers[31])
    for number in range(31):
        if matrix >> number & 1:
            found ^= _product(first, powers[30 - number])
    found ^= matrix >> 31 & 1
    assert found.bit_length() == _DEGREE + 1
    return tuple(term for term in range(_DEGREE) if found >> term & 1)


def _sum(one: int, other: int) -> int:
    return 1 << one | 1 << other


def _product(one: int, other: int) -> int:
    """Multiplies polynomials over GF(2); the second has few terms."""
    found, shift = 0, 0
    while other:
        step = (other & -other).bit_length() - 1
        shift += step
        found ^= one << shift
        other >>= step + 1
        shift += 1
    return found


# Words and draws.


def _next_words(words: np.ndarray, count: int) -> np.ndarray:
    """Returns the last 624 words of `words`, which are a block, and the `count` that follow."""
    found = np.concatenate([words, np.zeros(count, np.uint32)])
    for begin in range(0, count, BLOCK - _LAG):
        end = min(begin + BLOCK - _LAG, count)
        high, low = found[begin:end], found[begin + 1 : end + 1]
        mixed = (high & np.uint32(0x80000000)) | (low & np.uint32(0x7FFFFFFF))
        odd = (low & np.uint32(1)) * np.uint32(0x9908B0DF)
        found[BLOCK + begin : BLOCK + end] = found[begin + _LAG : end + _LAG] ^ (mixed >> np.uint32(1)) ^ odd
    return found[count:]


def _tempered(words: np.ndarray) -> np.ndarray:
    """Returns the numbers that are drawn from these words."""
    draws = words ^ (words >> np.uint32(11))
    draws = draws ^ ((draws << np.uint32(7)) & np.uint32(0x9D2C5680))
    draws = draws ^ ((draws << np.uint32(15)) & np.uint32(0xEFC60000))
    return draws ^ (draws >> np.uint32(18))


def _untempered(draws: np.ndarray) -> np.ndarray:
    """Returns the words of which these were drawn."""
    words = draws ^ (draws >> np.uint32(18))
    words = words ^ ((words << np.uint32(15)) & np.uint32(0xEFC60000))
    mixed = words
    for _ in range(4):
        mixed = words ^ ((mixed << np.uint32(7)) & np.uint32(0x9D2C5680))
    words = mixed
    for _ in range(2):
        mixed = words ^ (mixed >> np.uint32(11))
    return mixed
