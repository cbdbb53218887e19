"""The sweep: shapes of both chains, from a few microseconds to a convolution output of 1 GB, with the cases that kernels do not take."""

from __future__ import annotations

from collections.abc import Iterator

from .shapes import Shape


def _pooled(*sizes: int | tuple[int, ...], **rest: int | bool) -> Shape:
    return Shape("conv_gelu_pool", *sizes, **rest)


def _normed(*sizes: int | tuple[int, ...], **rest: int | bool | str) -> Shape:
    return Shape("conv_norm_pool_gelu", *sizes, **rest)


def _doubling(*sizes: int, **rest: int | str) -> Shape:
    """The headline's kind of transposed convolution."""
    *channels, d, h, w = sizes
    return _normed(*channels, 3, (d, h, w), stride=2, padding=1, transposed=True, output_padding=1, **rest)


def shapes() -> Iterator[Shape]:
    """Every shape of the sweep, at a GPU's size."""
    yield from _planes()
    yield from _other_ranks()
    yield from _doublings()
    yield from _other_norms()


def _planes() -> Iterator[Shape]:
    for n, c_in, c_out, kernel, *size in (
        (1, 1, 8, 3, 7, 7), (1, 16, 64, 3, 28, 28), (8, 3, 32, 7, 112, 112), (1, 64, 512, 1, 56, 56), (16, 64, 128, 3, 56, 56),
        (64, 16, 64, 3, 64, 64), (32, 256, 512, 1, 14, 14), (4, 8, 64, 5, 512, 512), (256, 32, 96, 3, 32, 32), (128, 8, 64, 3, 129, 129),
        (256, 256, 256, 1, 7, 7), (2, 4, 32, 3, 512, 512), (16, 8, 48, 2, 100, 100), (8, 24, 40, 4, 61, 61), (32, 12, 33, 6, 45, 45),
        (16, 5, 17, 3, 31, 57), (256, 1, 16, 5, 28, 28), (32, 8, 64, 3, 254, 254), (64, 8, 64, 3, 254, 254), (3, 7, 9, 7, 19, 83),
    ):  # fmt: skip
        yield _pooled(n, c_in, c_out, kernel, tuple(size))
    yield _pooled(1, 3, 64, 7, (224, 224), stride=2, padding=3)
    yield _pooled(4, 128, 256, 3, (28, 28), padding=1)
    yield _pooled(1, 256, 512, 3, (14, 14), padding=1)
    yield _pooled(64, 3, 64, 3, (128, 128), padding=1)
    for n, c_in, c_out, kernel, size, output_size in ((16, 16, 64, 3, 58, 7), (8, 32, 128, 3, 56, 4), (4, 64, 256, 1, 28, 14), (2, 3, 32, 5, 257, 16), (32, 16, 32, 3, 33, 2)):  # fmt: skip
        yield _pooled(n, c_in, c_out, kernel, (size, size), output_size=output_size)
    yield _pooled(8, 16, 32, 3, (56, 56), stride=2, padding=1, transposed=True, output_padding=1)
    yield _pooled(4, 64, 32, 4, (40, 40), stride=2, padding=1, transposed=True)
    yield _pooled(16, 32, 64, 2, (28, 28), stride=2, transposed=True)


def _other_ranks() -> Iterator[Shape]:
    for n, c_in, c_out, kernel, size in ((256, 64, 128, 5, 512), (1, 32, 64, 3, 512), (64, 1, 256, 7, 511), (16, 128, 512, 1, 127)):
        yield _pooled(n, c_in, c_out, kernel, (size,))
    yield _pooled(128, 16, 64, 4, (512,), output_size=8)
    yield _pooled(32, 64, 32, 3, (256,), stride=2, padding=1, transposed=True, output_padding=1)
    for n, c_in, c_out, kernel, *size in (
        (4, 8, 32, 3, 16, 48, 48), (1, 16, 64, 3, 8, 28, 28), (8, 4, 32, 5, 20, 40, 40), (2, 32, 128, 1, 7, 14, 14), (16, 3, 16, 3, 9, 33, 65),
        (1, 8, 64, 7, 32, 32, 32),
    ):  # fmt: skip
        yield _pooled(n, c_in, c_out, kernel, tuple(size))
    yield _pooled(2, 16, 32, 3, (16, 32, 32), output_size=2)
    yield _pooled(2, 16, 32, 3, (8, 16, 16), stride=2, padding=1, transposed=True, output_padding=1)


def _doublings() -> Iterator[Shape]:
    for sizes in (
        (1, 4, 8, 7, 8, 16), (1, 16, 32, 8, 16, 32), (2, 32, 64, 8, 16, 32), (4, 16, 16, 16, 32, 64), (8, 8, 32, 8, 24, 24),
        (16, 32, 64, 8, 16, 16), (2, 8, 16, 9, 17, 33), (1, 64, 128, 8, 16, 64), (16, 32, 64, 16, 32, 32), (32, 32, 64, 16, 32, 32),
        (2, 16, 32, 8, 16, 256), (1, 32, 64, 8, 8, 128), (256, 4, 8, 7, 7, 8), (64, 1, 16, 8, 8, 16), (4, 256, 64, 7, 8, 16), (1, 64, 512, 7, 7, 8),
    ):  # fmt: skip
        yield _doubling(*sizes)
    for addend in ("channel", "number", "none"):
        yield _doubling(4, 16, 32, 8, 16, 32, addend=addend)
    yield _doubling(2, 16, 32, 8, 16, 32, norm_ndim=2)
    yield _doubling(1, 4, 32, 8, 16, 64, norm_ndim=2, pool=4)
    yield _doubling(4, 32, 64, 8, 16, 32, pool=1)


def _other_norms() -> Iterator[Shape]:
    yield _normed(2, 16, 32, 2, (8, 16, 32), stride=2, transposed=True)
    yield _normed(4, 16, 32, 4, (8, 16, 16), stride=2, padding=1, transposed=True)
    yield _normed(2, 8, 32, 5, (8, 16, 32), stride=2, padding=2, transposed=True, output_padding=1)
    yield _normed(4, 32, 64, 1, (16, 16, 64), transposed=True)
    yield _normed(2, 32, 64, 3, (16, 32, 64), padding=1, transposed=True)
    yield _normed(2, 8, 32, 3, (24, 48, 48), padding=1, pool=3)
    yield _normed(4, 16, 64, 3, (16, 32, 64), padding=1)
    yield _normed(1, 3, 16, 5, (16, 64, 64), padding=2, pool=4)
    yield _normed(8, 4, 32, 1, (16, 32, 32), pool=1)
    yield _normed(2, 32, 32, 3, (17, 33, 65), stride=2)
    yield _normed(16, 8, 24, 3, (9, 18, 36), padding=1, addend="channel")
    yield _normed(1, 8, 16, 3, (8, 32, 512), padding=1)
    yield _normed(2, 16, 32, 2, (9, 21, 35))
    yield _normed(4, 8, 16, 3, (12, 24, 24), norm_ndim=2)
