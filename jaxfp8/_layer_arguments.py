"""What the arguments of layers mean, written once for flax.linen and flax.nnx.

Args:
  use_bias: whether the layer adds a bias.
  dtype: dtype that input, kernel and bias are converted to before the cast to FP8. The result has
    it, too, unless the layer has a `preferred_element_type`. Default: None, the dtype that these
    arrays promote to.
  param_dtype: dtype in which kernel and bias are stored.
  precision: None or "default" lets Hopper accumulate fast in the forward matmul. "high" or
    "highest" does not. A pair must be of two equal values.
  kernel_init: initializer of the kernel. Default: LeCun normal.
  bias_init: initializer of the bias. Default: zeros.
  promote_dtype: function that converts input, kernel and bias to `dtype`. Default: flax's.
  preferred_element_type: dtype of the matmul's result. Default: None, that of its operands.
  rngs: `nnx.Rngs` that draws the initial values. Stochastic rounding takes keys from its stream
    "fp8", or from its default stream.
  kernel_metadata: metadata of the `nnx.Param` of the kernel.
  bias_metadata: metadata of the `nnx.Param` of the bias.
  dot_general: do not pass it. The layer has its own matmul, and raises ValueError.
  dot_general_cls: do not pass it, for the same reason.
  recipe: which quantizer for which operand. Default: `fp8.recipes.delayed()`. Its scales come from
    earlier steps, by quantizer state. Linen has it in the collection `fp8.linen.COLLECTION`, nnx in
    `FP8State`. Train with `fp8.value_and_grad` or `fp8.nnx.value_and_grad`, which return the next
    state. `fp8.recipes.current()` has no state. If a recipe rounds stochastically, linen needs a
    key at each step: `rngs={"fp8": key}` of `apply`.
  reduce_axes: mesh axes that an amax is reduced over, inside `jax.shard_map`.
  x_shard: how the mesh splits the input (lhs), an `fp8.Shard`.
  w_shard: how the mesh splits the kernel (rhs), an `fp8.Shard`.
  y_shard: how the mesh splits the result of the matmul, an `fp8.Shard`.
  kernels: which kernels cast and multiply, for instance `fp8.Kernels("h200")`. Default: None, XLA
    alone, on every chip. It multiplies tiles in bfloat16.
  state_channel: how the quantizer state of a step leaves the backward pass. "gradient" is for
    loops that overwrite the state with its gradient. Default: None, for `fp8.value_and_grad` and
    `fp8.nnx.value_and_grad`.
  save_original: ("x",), ("w",) or both: the backward pass keeps this operand in high precision,
    and casts it again, see `fp8.dot_general`. Default: None, FP8 copies are saved.
  prologue: None, `fp8.prologues.SwiGLU()` or `fp8.prologues.RMSNorm()`. SwiGLU takes
    `inputs=(gate, up)`, and RMSNorm takes `inputs=(x, gain)`. The input of the matmul is then
    `prologue(*inputs)`, computed inside the cast. `promote_dtype` gets gate and up, or x. gain
    keeps its dtype, because the norm is computed in float32 and rounded once.
  experts: E, the number of experts of all devices.
  hidden: F, the hidden features of each expert.
  k: how many experts each token gets.
  parallel: how tokens go to experts over a mesh, an `fp8.moe.ExpertParallel`. Default: None, every
    device has all experts.
  scores: "softmax" or "sigmoid", see `fp8.moe.top_k`.
  normalized: whether gates are divided by their sum. Pass False for k = 1, see `fp8.moe.top_k`.
  clamp: see `fp8.moe.swiglu_experts`. It holds for a shared expert, too.
  shared: hidden features of a SwiGLU that every token passes beside its experts, two dense layers
    in FP8 without bias. Default: 0, there is none.
  router_init: initializer of the router [K, E]. Default: LeCun normal.
  state_per_expert: whether each expert has quantizer states of its own, stacked along axis 0 like
    the kernels. Otherwise one state records the largest amax of all.
  state_per_group: whether each group has a quantizer state of its own, stacked along axis 0 like
    the kernel. Otherwise one state records the largest amax of all groups.
"""

import inspect
import re
import typing
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

_SECTION = re.compile(r"^(Args|Attributes):\n((?:  .+\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^  (\w+): .*(?:\n    .+)*", re.MULTILINE)  # with the lines that go on


def documented(layer_class: C) -> C:
    """A class decorator: `help` of a layer shows each argument, with its default and its text.

    A text in the docstring of the class wins over that of this file. An IDE that does not run code
    shows the docstring without the texts of this file.
    """
    layer: Any = layer_class
    _unpack_arguments(layer.__init__, layer.__mro__[1].__init__)
    layer.__signature__ = _OfConstructor()
    doc = inspect.cleandoc(layer.__doc__ or "") + "\n"
    if _SECTION.search(doc):  # python -OO has no docstrings
        names = [each for each in inspect.signature(layer).parameters if each not in _OF_MODULES]
        texts = _texts_of(__doc__) | _texts_of(doc)
        entries = "\n".join(texts.get(name, f"  {name}: see flax's layer.") for name in names)
        layer.__doc__ = _SECTION.sub(lambda found: f"{found[1]}:\n{entries}\n", doc, count=1)
    return layer_class


_OF_MODULES = ("parent", "name")  # arguments of every linen module


def _texts_of(doc: str) -> dict[str, str]:
    section = _SECTION.search(doc)
    return {} if section is None else {entry[1]: entry[0] for entry in _ENTRY.finditer(section[2])}


def _unpack_arguments(init: Any, of_flax: Any) -> None:
    """Give the constructor of an nnx layer the signature that its `**arguments` stand for.

    Defaults are those of flax's layer. Options of jaxfp8 have the default None.
    """
    *own, packed = inspect.signature(init).parameters.values()
    if packed.kind is packed.VAR_KEYWORD:
        flax = inspect.signature(of_flax).parameters
        parameters = {each.name: each for each in own} | {
            name: inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=flax[name].default if name in flax else None,
                annotation=annotation,
            )
            for name, annotation in typing.get_type_hints(packed.annotation.__args__[0]).items()
        }
        first = [each.name for each in own if each.kind is not each.KEYWORD_ONLY]
        order = dict.fromkeys([*first, *(name for name in flax if name in parameters), *parameters])
        init.__signature__ = inspect.Signature([parameters[name] for name in order])


class _OfConstructor:
    """The signature of a class is that of its `__init__`, in subclasses too.

    `inspect` would take that of `__new__`, or of `__call__` of flax's metaclass.
    """

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        if instance is not None:  # a layer is called as its `__call__` says
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])
