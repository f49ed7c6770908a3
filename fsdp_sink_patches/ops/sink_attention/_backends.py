"""Which kernel computes a part, and how each kernel is called.

Every backend offers the same two functions: attention of one part with its log-sum-exp, and the gradients of a part
given the merged pair. None of them needs to know what a sink is; flash-attn 4 takes one natively, and flash-attn 2 and
torch's kernels with our Triton forward.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import InvalidVersion, Version
from torch import Tensor

from fsdp_sink_patches.ops.sink_attention import _merge, reference

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One call of a kernel: which keys each query sees, and the numbers that shape the softmax.

    ``cu_seqlens_*`` are int32 ``[documents + 1]`` for packed ``[tokens, heads, head_dim]`` tensors and None for dense
    ``[batch, seqlen, heads, head_dim]``. ``window`` is (left, right), inclusive, ``-1`` unbounded, already bounded at
    0 on the right for causal attention.
    """

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window: tuple[int, int]
    softcap: float
    deterministic: bool

    @property
    def causal(self) -> bool:
        """Causal without a left bound, which kernels have a faster path for."""
        return self.window == (-1, 0)


@dataclass(frozen=True)
class Request:
    """What decides whether a backend can serve a call; hashable, so that the choice is made once per shape."""

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    heads: int
    kv_heads: int
    softcap: bool
    deterministic: bool

    def __str__(self) -> str:
        name = self.device if self.device != "cuda" else f"cuda sm{self.capability[0]}{self.capability[1]}"
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"{name} {str(self.dtype).removeprefix('torch.')} heads {self.heads}/{self.kv_heads} head_dim {dims}"


class Backend:
    """A way to compute a part. ``unavailable`` speaks of the installation, ``refuses`` of one request."""

    name: str
    native_sinks = False
    native_sink_gradient = False

    def unavailable(self) -> str | None:
        """Why this backend cannot be used in this process, or None."""
        raise NotImplementedError

    def refuses(self, request: Request) -> str | None:
        """Why this backend cannot serve the request, or None."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """``out`` like ``q`` with v's head_dim, and its log-sum-exp, ``[heads, tokens]`` or ``[batch, heads, seqlen]``.

        ``sinks`` is given to a backend with ``native_sinks`` only; the pair then includes them.
        """
        raise NotImplementedError

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` of a part, given the merged ``out`` and ``lse``."""
        raise NotImplementedError

    def backward_with_sinks(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, sinks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same and ``dsinks``, for a backend with ``native_sink_gradient``."""
        raise NotImplementedError


class Reference(Backend):
    """Plain torch: any device, any dtype, any head_dim."""

    name = "reference"

    def unavailable(self) -> str | None:
        return None

    def refuses(self, request: Request) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return reference.forward(q, k, v, **self._arguments(part))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        return reference.backward(dout, q, k, v, out, lse, **self._arguments(part))

    @staticmethod
    def _arguments(part: Part) -> dict[str, Any]:
        return {
            "cu_seqlens_q": part.cu_seqlens_q,
            "cu_seqlens_k": part.cu_seqlens_k,
            "scale": part.scale,
            "window": part.window,
            "softcap": part.softcap,
        }


class _Flash(Backend):
    """What all flash kernels share: CUDA, half precision, a bounded head_dim that is a multiple of 8."""

    min_capability = (8, 0)
    max_head_dim = 256

    def refuses(self, request: Request) -> str | None:
        if request.device != "cuda":
            return f"needs CUDA tensors, got {request.device}"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, got {str(request.dtype).removeprefix('torch.')}"
        if request.capability < self.min_capability:
            return f"needs compute capability {'.'.join(map(str, self.min_capability))}, got {request.capability}"
        if max(request.head_dim, request.head_dim_v) > self.max_head_dim:
            return f"head_dim goes up to {self.max_head_dim}, got {max(request.head_dim, request.head_dim_v)}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        dims = (q.shape[-1], v.shape[-1])
        out, lse = self._forward(*self._padded(q, k, v), part, sinks)
        return (out if out.shape[-1] == dims[1] else out[..., : dims[1]]), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = (q.shape[-1], v.shape[-1])
        qp, kp, vp = self._padded(q, k, v)
        width = vp.shape[-1] - dims[1]
        dq, dk, dv = self._backward(_pad(dout, width), qp, kp, vp, _pad(out, width), lse, part)
        return dq[..., : dims[0]], dk[..., : dims[0]], dv[..., : dims[1]]

    def _padded(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One head_dim for all three, a multiple of 8: zeros in q and k add nothing to a score, zeros in v are cut
        off."""
        width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
        return _pad(q, width - q.shape[-1]), _pad(k, width - k.shape[-1]), _pad(v, width - v.shape[-1])

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


def _pad(x: Tensor, width: int) -> Tensor:
    if width > 0:
        return F.pad(x, (0, width))
    return x if x.stride(-1) == 1 else x.contiguous()


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """torch's own kernels read determinism from the process-wide switch."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or before == (True, False):
        yield
        return
    torch.use_deterministic_algorithms(True)  # under warn_only the flash backward stays nondeterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class _FlashTwo(_Flash):
    """flash-attention 2, torch's build or the package's: with sinks a Triton forward takes its forward's place.

    Its own forward rounds ``out`` before the sink can rescale it, which makes 1.3 times the error; see
    ``_forward_kernel``.
    """

    native_sinks = True

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is None:
            return self._plain(q, k, v, part)
        if _merge.have_triton() and part.softcap == 0 and q.is_cuda:
            from fsdp_sink_patches.ops.sink_attention import _forward_kernel

            pair = _forward_kernel.forward(
                q, k, v, sinks, cu_seqlens_q=part.cu_seqlens_q, cu_seqlens_k=part.cu_seqlens_k,
                max_seqlen_q=part.max_seqlen_q, scale=part.scale, window=part.window,
            )  # fmt: skip
            if pair is not None:
                return pair
        return _merge.merge(*self._plain(q, k, v, part), sinks)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """The build's own forward, without a sink."""
        raise NotImplementedError


class TorchFlash(_FlashTwo):
    """The flash-attention 2 kernels that torch itself ships; no package needed."""

    name = "torch"

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        if not torch.backends.cuda.is_flash_attention_available():
            return f"torch {torch.__version__} was built without flash attention"
        return None

    def refuses(self, request: Request) -> str | None:
        if request.softcap:
            return "torch's flash kernels have no softcap"
        return super().refuses(request)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, part.cu_seqlens_q, part.cu_seqlens_k, part.max_seqlen_q, part.max_seqlen_k,
            0.0, part.causal, False,
            scale=part.scale, window_size_left=part.window[0], window_size_right=part.window[1],
        )  # fmt: skip
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        # without dropout the random state is not read
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        with _deterministic(part.deterministic):
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, part.cu_seqlens_q, part.cu_seqlens_k, part.max_seqlen_q, part.max_seqlen_k,
                0.0, part.causal, unused, unused,
                scale=part.scale, window_size_left=part.window[0], window_size_right=part.window[1],
            )  # fmt: skip
        return dq, dk, dv


class FlashAttn2(_FlashTwo):
    """The ``flash-attn`` package, 2.7.4.post1 or newer (older releases return other tuples)."""

    name = "flash-attn-2"
    oldest = Version("2.7.4.post1")

    def unavailable(self) -> str | None:
        return _distribution_problem("flash-attn", self.oldest) or _import_problem("flash_attn.flash_attn_interface")

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        api: Any = importlib.import_module("flash_attn.flash_attn_interface")
        if part.cu_seqlens_q is None:
            out, lse, *_ = api._flash_attn_forward(q, k, v, **self._shared(part), return_softmax=False)
        else:
            out, lse, *_ = api._flash_attn_varlen_forward(
                q, k, v, part.cu_seqlens_q, part.cu_seqlens_k, part.max_seqlen_q, part.max_seqlen_k,
                **self._shared(part), return_softmax=False,
            )  # fmt: skip
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        api: Any = importlib.import_module("flash_attn.flash_attn_interface")
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = {**self._shared(part), "deterministic": part.deterministic}
        if part.cu_seqlens_q is None:
            api._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, **options)
        else:
            api._flash_attn_varlen_backward(
                dout, q, k, v, out, lse, dq, dk, dv,
                part.cu_seqlens_q, part.cu_seqlens_k, part.max_seqlen_q, part.max_seqlen_k, **options,
            )  # fmt: skip
        return dq, dk, dv

    @staticmethod
    def _shared(part: Part) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": part.scale,
            "causal": part.causal,
            "window_size_left": part.window[0],
            "window_size_right": part.window[1],
            "softcap": part.softcap,
            "alibi_slopes": None,
        }


class FlashAttn3(_Flash):
    """``flash_attn_interface``, the Hopper build of flash-attention 3."""

    name = "flash-attn-3"
    min_capability = (9, 0)

    def unavailable(self) -> str | None:
        problem = _import_problem("flash_attn_interface")
        if problem is None and not hasattr(importlib.import_module("flash_attn_interface"), "_flash_attn_backward"):
            return "flash_attn_interface has no _flash_attn_backward"
        return problem

    def refuses(self, request: Request) -> str | None:
        if request.capability[0] != 9:
            return f"flash-attention 3 is built for Hopper (9.x), got capability {request.capability}"
        return super().refuses(request)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        api: Any = importlib.import_module("flash_attn_interface")
        out, lse, *_ = _call(api._flash_attn_forward, q=q, k=k, v=v, **self._shared(part), causal=part.causal)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        api: Any = importlib.import_module("flash_attn_interface")
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # the flag is called causal in older builds, is_causal in newer ones
        flag = "is_causal" if "is_causal" in _parameters(api._flash_attn_backward) else "causal"
        _call(
            api._flash_attn_backward,
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
            **self._shared(part), deterministic=part.deterministic, **{flag: part.causal},
        )  # fmt: skip
        return dq, dk, dv

    @staticmethod
    def _shared(part: Part) -> dict[str, Any]:
        return {
            "cu_seqlens_q": part.cu_seqlens_q,
            "cu_seqlens_k": part.cu_seqlens_k,
            "max_seqlen_q": part.max_seqlen_q if part.cu_seqlens_q is not None else None,
            "max_seqlen_k": part.max_seqlen_k if part.cu_seqlens_q is not None else None,
            "softmax_scale": part.scale,
            "window_size_left": part.window[0],
            "window_size_right": part.window[1],
            "softcap": part.softcap,
        }


class FlashAttn4(_Flash):
    """``flash-attn-4`` (``flash_attn.cute``), 4.0.0b26 or newer: older ones return no gradient for the sink, and no
    error."""

    name = "flash-attn-4"
    native_sinks = True
    native_sink_gradient = True
    oldest = Version("4.0.0b26")
    min_capability = (9, 0)

    def unavailable(self) -> str | None:
        problem = _distribution_problem("flash-attn-4", self.oldest) or _import_problem("flash_attn.cute.interface")
        if problem is not None:
            return problem
        api = importlib.import_module("flash_attn.cute.interface")
        # the one sign of a sink gradient that holds for every build: its version string reads 0.0.0
        if "learnable_sink" not in _parameters(api._flash_attn_bwd):
            return "its backward takes no learnable_sink, so sinks would get no gradient"
        return None

    def refuses(self, request: Request) -> str | None:
        if request.capability[0] not in (9, 10, 11):
            return f"its sink backward runs on compute capability 9.x, 10.x and 11.x, got {request.capability}"
        if request.deterministic and request.head_dim > 128:
            return f"no deterministic backward is known for head_dim {request.head_dim}"
        if request.capability[0] != 9 and request.head_dim > 128:
            return f"on compute capability 10.x and 11.x head_dim goes up to 128, got {request.head_dim}"
        return super().refuses(request)

    def _padded(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if q.shape[-1] == 192 and v.shape[-1] == 128 and q.shape[-2] == k.shape[-2]:
            return _pad(q, 0), _pad(k, 0), _pad(v, 0)  # taken as it is; grouped heads need equal head_dims in backward
        # its backward is built for these widths; 72, say, is accepted and fails there
        width = next(w for w in (64, 128, 192, 256) if w >= max(q.shape[-1], v.shape[-1]))
        return _pad(q, width - q.shape[-1]), _pad(k, width - k.shape[-1]), _pad(v, width - v.shape[-1])

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        api: Any = importlib.import_module("flash_attn.cute.interface")
        out, lse, *_ = api._flash_attn_fwd(q, k, v, **self._shared(part), learnable_sink=sinks, return_lse=True)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._differentiate(dout, q, k, v, out, lse, part, None)
        return dq, dk, dv

    def backward_with_sinks(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, sinks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = (q.shape[-1], v.shape[-1])
        qp, kp, vp = self._padded(q, k, v)
        width = vp.shape[-1] - dims[1]
        dq, dk, dv, dsinks = self._differentiate(_pad(dout, width), qp, kp, vp, _pad(out, width), lse, part, sinks)
        return dq[..., : dims[0]], dk[..., : dims[0]], dv[..., : dims[1]], dsinks

    def _differentiate(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, sinks: Tensor | None
    ) -> Any:
        api: Any = importlib.import_module("flash_attn.cute.interface")
        return api._flash_attn_bwd(
            q, k, v, out, dout, lse, **self._shared(part), deterministic=part.deterministic, learnable_sink=sinks
        )

    @staticmethod
    def _shared(part: Part) -> dict[str, Any]:
        packed = part.cu_seqlens_q is not None
        left, right = part.window
        return {
            "cu_seqlens_q": part.cu_seqlens_q,
            "cu_seqlens_k": part.cu_seqlens_k,
            "max_seqlen_q": part.max_seqlen_q if packed else None,
            "max_seqlen_k": part.max_seqlen_k if packed else None,
            "softmax_scale": part.scale,
            "causal": part.causal,
            # from b30 a window of (-1, 0) is a local window with left = -1: unbounded must be None
            "window_size_left": None if left < 0 else left,
            "window_size_right": None if right < 0 or part.causal else right,
            "softcap": part.softcap,
        }


BACKENDS: tuple[Backend, ...] = (FlashAttn4(), FlashAttn3(), FlashAttn2(), TorchFlash(), Reference())
"""Best first."""


def backends() -> dict[str, str]:
    """Each backend's name, best first, with ``"available"`` or the reason why it is not."""
    return {backend.name: _unavailable(backend.name) or "available" for backend in BACKENDS}


@lru_cache(maxsize=4096)
def select(request: Request, name: str | None = None) -> Backend:
    """The best backend for a request, or the one named.

    Raises:
        ValueError: the named backend does not exist, is not available, or refuses the request; says why.
    """
    if name is not None:
        return _named(request, name)
    passed_over: list[str] = []
    for backend in BACKENDS:
        reason = _unavailable(backend.name) or backend.refuses(request)
        if reason is None:
            details = "; ".join(passed_over)
            log.debug("sink attention: %s for %s%s", backend.name, request, f" ({details})" if details else "")
            if backend.name == "reference" and request.device == "cuda":
                log.warning(
                    "sink attention: no flash kernel serves %s, so the plain torch reference runs: right, but slow. %s",
                    request, details,
                )  # fmt: skip
            return backend
        passed_over.append(f"{backend.name}: {reason}")
    raise AssertionError("the reference refuses nothing")


def _named(request: Request, name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            reason = _unavailable(name) or backend.refuses(request)
            if reason is not None:
                raise ValueError(f"backend {name!r} cannot serve {request}: {reason}")
            return backend
    raise ValueError(f"backend is {name!r}; expected one of {', '.join(b.name for b in BACKENDS)}, or None to choose")


@lru_cache(maxsize=16)
def _unavailable(name: str) -> str | None:
    return next(b for b in BACKENDS if b.name == name).unavailable()


def _distribution_problem(distribution: str, oldest: Version) -> str | None:
    """Versions come from distribution metadata: ``flash_attn.cute.__version__`` is "0.0.0" in every release."""
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    try:
        if Version(found) < oldest:
            return f"{distribution} {found} is older than {oldest}"
    except InvalidVersion:
        return f"{distribution} has no readable version ({found!r})"
    return None


def _import_problem(module: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
        importlib.import_module(module)
    except Exception as error:  # a binary built for another torch fails in many ways; each is a reason not to use it
        return f"importing {module} failed: {type(error).__name__}: {error}"
    return None


@lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Parameter names of a function or of a torch custom op, which keeps its Python function inside."""
    inner = getattr(function, "_init_fn", function)
    return frozenset(inspect.signature(inner).parameters)


def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call with arguments by name; a window is one pair or two numbers, depending on the build."""
    if "window_size" in _parameters(function):
        arguments["window_size"] = (arguments.pop("window_size_left"), arguments.pop("window_size_right"))
    return function(**arguments)
