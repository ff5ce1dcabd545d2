"""The C interface of ``csrc/abi.h`` in ctypes.

pybind and the dispatcher cost several microseconds per call and tie the library to a Python and a
torch. ctypes with a filled structure costs less than one.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cuda_ops.layout import Main, Moment, Segments, Shard, chunks_of, moment_kind

if TYPE_CHECKING:
    from cuda_ops.state import StepState

ABI_VERSION = 1

_MAIN = {Main.FP32: 0, Main.SPLIT16: 1, Main.SPLIT8: 2, Main.BF16: 3}
_MOMENT = {Moment.NONE: 0, Moment.FP32: 1, Moment.BF16: 2, Moment.BLOCK8: 3}


class _Segments(c.Structure):
    _fields_ = (
        *[
            (name, c.c_void_p)
            for name in ("start", "group", "norm_weight", "key", "first", "chunk_segment")
        ],
        ("numel", c.c_int64),
        ("count", c.c_int64),
    )


class _StepArgs(c.Structure):
    _fields_ = (
        ("segments", _Segments),
        *[
            (name, c.c_void_p)
            for name in (
                "weight",
                "rest",
                "grad",
                "exp_avg",
                "exp_avg_sq",
                "exp_avg_scale",
                "exp_avg_sq_scale",
                "derived",
                "counters",
                "scalars",
            )
        ],
        ("first_chunk", c.c_int64),
        ("chunks", c.c_int64),
        *[
            (name, c.c_int32)
            for name in (
                "algorithm",
                "grad_kind",
                "main_kind",
                "first_kind",
                "second_kind",
                "device",
                "threads",
            )
        ],
    )


class _PrepareArgs(c.Structure):
    _fields_ = (
        *[
            (name, c.c_void_p)
            for name in ("hyper", "powers", "derived", "counters", "scalars", "norm2", "scale")
        ],
        ("max_norm", c.c_float),
        *[(name, c.c_int32) for name in ("groups", "algorithm", "device")],
    )


class _NormArgs(c.Structure):
    _fields_ = (
        ("segments", _Segments),
        *[(name, c.c_void_p) for name in ("values", "out", "partials", "scale")],
        ("first_chunk", c.c_int64),
        ("chunks", c.c_int64),
        *[(name, c.c_int32) for name in ("kind", "dp", "device", "threads")],
    )


class _ConvertArgs(c.Structure):
    _fields_ = (
        *[(name, c.c_void_p) for name in ("values", "codes", "extra")],
        ("numel", c.c_int64),
        *[(name, c.c_int32) for name in ("kind", "second", "device")],
    )


class LibraryError(RuntimeError):
    """A compiled call refused its arguments or could not be launched."""


class Library:
    """One loaded library. Its calls are those of ``cuda_ops.ops``, with checked arguments.

    Attributes:
        path: The file.
        built_for: What it was built for, in the library's own words.
    """

    def __init__(self, path: Path) -> None:
        """Load a library.

        Args:
            path: The file.

        Raises:
            OSError: If the file cannot be loaded, as one for another architecture.
            LibraryError: If its interface is another one.
        """
        self.path = path
        self._dll = dll = c.CDLL(str(path))
        try:
            version = dll.goose_abi_version()
        except AttributeError as error:
            raise LibraryError(f"{path} is no library of cuda_ops") from error
        if version != ABI_VERSION:
            raise LibraryError(f"{path} has interface {version}, this package {ABI_VERSION}")
        dll.goose_build.restype = dll.goose_error.restype = c.c_char_p
        self.built_for: str = dll.goose_build().decode()
        dll.goose_reduce.argtypes = [c.c_void_p, c.c_int64, c.c_void_p, c.c_int, c.c_void_p]
        for name in (
            "sum_of_squares",
            "prepare",
            "step",
            "unpack",
            "split_main",
            "join_main",
            "write_moment",
            "read_moment",
        ):
            getattr(dll, f"goose_{name}").argtypes = [c.c_void_p, c.c_void_p]

    def probe(self, device: int) -> str | None:
        """Launch an empty kernel and wait for it; return what is wrong, or ``None``."""
        code = self._dll.goose_probe(device)
        return None if code == 0 else f"{self._words(code)} (code {code})"

    def sum_of_squares(
        self, grad: Tensor, segments: Segments, out: Tensor, *, chunks: range | None = None
    ) -> None:
        """See ``ops.sum_of_squares``; only the given chunks."""
        args = _norm_args(segments, out, chunks)
        args.values = grad.data_ptr()
        args.kind = _grad_kind(grad)
        args.device = _ordinal(grad)
        self._call("sum_of_squares", args, grad)

    def unpack(
        self,
        received: Tensor,
        out: Tensor,
        scale: Tensor | None,
        segments: Segments,
        partials: Tensor,
    ) -> None:
        """See ``ops.unpack``."""
        args = _norm_args(segments, partials, None)
        args.values, args.out, args.scale = received.data_ptr(), out.data_ptr(), _pointer(scale)
        args.kind, args.dp, args.device = _grad_kind(out), received.shape[0], _ordinal(out)
        self._call("unpack", args, out)

    def reduce_partials(self, partials: Tensor, out: Tensor) -> None:
        """See ``ops.reduce_partials``."""
        code = self._dll.goose_reduce(
            partials.data_ptr(), partials.numel(), out.data_ptr(), _ordinal(out), _stream(out)
        )
        self._raise(code, "reduce")

    def prepare(
        self, state: StepState, norm2: Tensor, max_norm: float, scale: Tensor | None
    ) -> None:
        """See ``ops.prepare``."""
        args = _PrepareArgs(
            state.hyper.data_ptr(),
            state.powers.data_ptr(),
            state.derived.data_ptr(),
            state.counters.data_ptr(),
            state.scalars.data_ptr(),
            norm2.data_ptr(),
            _pointer(scale),
            max_norm,
            state.hyper.shape[0],
            int(state.algorithm),
            _ordinal(norm2),
        )
        self._call("prepare", args, norm2)

    def step(
        self,
        shard: Shard,
        grad: Tensor,
        segments: Segments,
        state: StepState,
        *,
        chunks: range | None = None,
    ) -> None:
        """See ``ops.step``; only the given chunks."""
        args = step_args(shard, segments, state, chunks=chunks)
        self.step_with(args, grad)

    def step_with(self, args: _StepArgs, grad: Tensor) -> None:
        """Step with arguments that were filled before; only the gradient is exchanged.

        Args:
            args: From ``step_args``. Its tensors must be alive.
            grad: ``[n]`` fp32 or bf16.
        """
        args.grad = grad.data_ptr()
        args.grad_kind = 1 if grad.dtype == torch.bfloat16 else 0
        self._call("step", args, grad)

    def split_main(self, shard: Shard, values: Tensor) -> None:
        """See ``ops.split_main``."""
        self._call("split_main", _main_args(shard, values), values)

    def join_main(self, shard: Shard, out: Tensor) -> None:
        """See ``ops.join_main``."""
        self._call("join_main", _main_args(shard, out), out)

    def write_moment(self, x: Tensor, values: Tensor, scales: Tensor | None) -> None:
        """See ``ops.write_moment``."""
        self._call("write_moment", _moment_args(x, values, scales), x)

    def read_moment(self, values: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """See ``ops.read_moment``."""
        self._call("read_moment", _moment_args(out, values, scales), out)

    def _call(self, name: str, args: c.Structure, like: Tensor) -> None:
        code = getattr(self._dll, f"goose_{name}")(c.addressof(args), _stream(like))
        if code:
            self._raise(code, name)

    def _raise(self, code: int, name: str) -> None:
        if code:
            raise LibraryError(f"{name}: {self._words(code)} (code {code}, {self.path.name})")

    def _words(self, code: int) -> str:
        words: bytes = self._dll.goose_error(code)
        return words.decode()


def step_args(
    shard: Shard, segments: Segments, state: StepState, *, chunks: range | None = None
) -> _StepArgs:
    """Fill the arguments of a step once, for a shard that is stepped often.

    Args:
        shard: Its tensors must stay where they are.
        segments: What lies where.
        state: The optimizer's state.
        chunks: Step only these chunks; all by default.
    """
    where = range(chunks_of(segments.numel)) if chunks is None else chunks
    return _StepArgs(
        _segments(segments),
        _pointer(shard.weight),
        _pointer(shard.rest),
        None,
        _pointer(shard.exp_avg),
        _pointer(shard.exp_avg_sq),
        _pointer(shard.exp_avg_scale),
        _pointer(shard.exp_avg_sq_scale),
        state.derived.data_ptr(),
        state.counters.data_ptr(),
        state.scalars.data_ptr(),
        where.start,
        len(where),
        int(state.algorithm),
        0,
        _MAIN[shard.main],
        _MOMENT[shard.first_moment],
        _MOMENT[shard.second_moment],
        _ordinal(state.derived),
        torch.get_num_threads(),
    )


def _segments(s: Segments) -> _Segments:
    tensors = (s.start, s.group, s.norm_weight, s.key, s.first, s.chunk_segment)
    return _Segments(*[t.data_ptr() for t in tensors], s.numel, s.start.numel())


def _norm_args(segments: Segments, partials: Tensor, chunks: range | None) -> _NormArgs:
    where = range(chunks_of(segments.numel)) if chunks is None else chunks
    args = _NormArgs(segments=_segments(segments), partials=partials.data_ptr())
    args.first_chunk, args.chunks = where.start, len(where)
    args.threads = torch.get_num_threads()
    return args


def _main_args(shard: Shard, values: Tensor) -> _ConvertArgs:
    return _ConvertArgs(
        values.data_ptr(),
        _pointer(shard.weight),
        _pointer(shard.rest),
        values.numel(),
        _MAIN[shard.main],
        0,
        _ordinal(values),
    )


def _moment_args(x: Tensor, values: Tensor, scales: Tensor | None) -> _ConvertArgs:
    return _ConvertArgs(
        x.data_ptr(),
        values.data_ptr(),
        _pointer(scales),
        x.numel(),
        _MOMENT[moment_kind(values)],
        int(values.dtype == torch.uint8),
        _ordinal(x),
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _grad_kind(tensor: Tensor) -> int:
    return 1 if tensor.dtype == torch.bfloat16 else 0


def _ordinal(tensor: Tensor) -> int:
    return tensor.device.index or 0


def _stream(tensor: Tensor) -> int | None:
    if tensor.device.type != "cuda":
        return None
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
