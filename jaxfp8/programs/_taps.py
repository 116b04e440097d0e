"""Taps, which pass the operands of a matmul to a function of the user each time that it runs.

A tap is a call of jax's own callback target. It returns nothing and is marked as having a side
effect. Without the mark, the compiler would remove it.

References:
  jax, jax/_src/callback.py (emit_python_callback) and XLA, xla/python/ifrt/host_callback.h.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8.programs._hlo import tensors_of
from jaxfp8.programs._types import array_type, spelled
from jaxfp8.programs._writer import Writer

TARGET = "xla_ffi_python_cpu_callback"

# label, lhs, rhs, lhs_scale, rhs_scale
Seen = Callable[[str, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None], Any]


class Taps:
    """The taps of one program.

    Attributes:
      callbacks: the functions that XLA calls. The program holds the index of each.
      error: the first error that `seen` raised. XLA would report only its text.
    """

    def __init__(self, seen: Seen | None) -> None:
        self._seen = seen
        self.callbacks: list[Callable[..., tuple[()]]] = []
        self.error: BaseException | None = None

    def show(
        self,
        writer: Writer,
        label: str,
        lhs: str,
        rhs: str,
        lhs_scale: str | None = None,
        rhs_scale: str | None = None,
    ) -> None:
        """Writes a call that passes these operands to `seen`."""
        if self._seen is None:
            return
        given = [lhs, rhs, lhs_scale, rhs_scale]
        dtypes = [None if x is None else writer.type_of(x).dtype for x in given]
        sent = [_as_bytes(writer, x) for x in given if x is not None]
        writer.emit(
            "()",
            "custom-call",
            *sent,
            also=[
                f'custom_call_target="{TARGET}"',
                "custom_call_has_side_effect=true",
                "api_version=API_VERSION_TYPED_FFI",
                f"backend_config={{index = {len(self.callbacks)} : ui64}}",
            ],
        )
        self.callbacks.append(self._callback(label, dtypes))

    def _callback(self, label: str, dtypes: list[str | None]) -> Callable[..., tuple[()]]:
        def called(*arrays: Any) -> tuple[()]:
            given = iter(arrays)
            shown = [None if dtype is None else _as_array(next(given), dtype) for dtype in dtypes]
            try:
                if self.error is None and self._seen is not None:
                    self._seen(label, *shown)  # type: ignore[arg-type]
            except BaseException as error:  # `execute` raises it again in the caller
                self.error = error
            return ()

        return called


def _as_bytes(writer: Writer, x: str) -> str:
    """`x` in a type that callbacks accept. They accept neither FP8 nor 4-bit types."""
    type = writer.type_of(x)
    if type.bits < 8:
        return writer.convert(x, "f32")
    if not type.is_float or type.bits > 16:
        return x
    return writer.emit(spelled(f"u{type.bits}", type.shape), "bitcast-convert", x)


def _as_array(x: Any, dtype: str) -> np.ndarray:
    """A copy of `x` in its own dtype. XLA reuses the memory of `x` after the callback."""
    named = jnp.dtype(tensors_of(f"{dtype}[]")[0].dtype)
    array = np.array(x)
    return array.astype(named) if array_type(f"{dtype}[]").bits < 8 else array.view(named)
