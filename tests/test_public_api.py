"""The face: exactly these names, and an example beside each that can be called."""

import ast
import importlib
from pathlib import Path

import pytest

import jaxfp8 as fp8

# Per namespace, the names that users type. A name is added or removed here on purpose or not at
# all.
EXPECTED = {
    "jaxfp8": """
        E4M3 E5M2 E8M0 PerTensor PerAxis PerBlock ScaleRule QuantizedTensor quantize fake_quantize
        scaled_matmul dot dot_general einsum ragged_dot Recipe Shard Kernels
        init_state check_state value_and_grad commit merge_seen nothing_seen freeze settle fork
        state_specs FP8StateError save_fp8_residuals quantize_params memory_report
        recipes quantizers prologues linen nnx sharding comms plan programs state diagnostics
        weights optim moe convert conversion checkpoint __version__
    """,
    "jaxfp8.linen": """
        FP8Dense FP8DenseGeneral FP8Einsum FP8GroupedLinear FP8MoE FP8DotGeneral FP8EinsumOp
        TrainState COLLECTION
        state_specs add_state
    """,
    "jaxfp8.nnx": """
        FP8Linear FP8LinearGeneral FP8Einsum FP8GroupedLinear FP8MoE FP8DotGeneral FP8EinsumOp
        FP8State value_and_grad
        commit freeze settle add_state
    """,
    "jaxfp8.numerics": """
        amax saturating_cast encoding_multiplier E4M3 E5M2 E8M0 Format PerTensor PerAxis PerRow
        PerBlock
    """,
    "jaxfp8.quantizers": """
        AbstractQuantizer KnownScale RowState ScaleInputs Current Delayed Static Identity Format
        PerRow register_quantizer_serialization
    """,
    "jaxfp8.recipes": """
        Recipe Operands delayed current rowwise blockwise mxfp8 static identity get parse to_string
        to_dict from_dict
    """,
    "jaxfp8.sharding": "MeshRoles Shard quantized_specs",
    "jaxfp8.programs": """
        assert_fp8_gemms run_on_cpu wire_report assert_wire_dtype WireReport Transfer
        tpu_cycles CyclesReport CyclesRow
    """,
    "jaxfp8.plan": "Choice Choices Timings autotune roofline skip_slow",
    "jaxfp8.prologues": "RMSNorm SwiGLU",
    "jaxfp8.conversion": "Coverage CoverageRow FP8Function Rule",
    "jaxfp8.state": "MatmulState in_gradient_channel",
    "jaxfp8.diagnostics": "collect summary Summary Records CastRow StateRow SumRow",
    "jaxfp8.weights": "QuantizedWeight WeightAxes",
    "jaxfp8.optim": """
        with_master_weights init_master_weights master_weights MasterWeightsState
        BFloat16Plus Float16 Float32 Overwrite BFloat16 FP8 Int8 ExpandedFP8
        PerParameter check_state
        with_moment_formats MomentFormatsState adamw fused_adamw scale_by_adam scale_by_muon
        release Release Released
    """,
    "jaxfp8.moe": """
        ExpertParallel ExpertsOutput swiglu_experts MoEStats Choices load load_balancing_loss top_k
        z_loss dispatch_matmul matmul_combine route Route combine dispatch
    """,
    "jaxfp8.checkpoint": """
        export Exported load weights names Row LAYOUTS Format FORMATS CheckpointError
    """,
    "jaxfp8.comms": """
        all_gather all_to_all ppermute all_reduce_gradients reduce_scatter_gradients
        init_gradient_sums GradientSumState BFloat16Sum TwoPhaseFP8 AutoScaledFP8
    """,
}

ROOT = Path(__file__).parent.parent


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def names_of(source: str) -> list[str]:
    """Lists what a face re-exports.

    Raises:
      ValueError: it does more than re-export names as themselves.
    """
    names = []
    for node in ast.parse(source).body:
        if is_docstring(node) or (isinstance(node, ast.FunctionDef) and node.name == "__dir__"):
            continue
        if not isinstance(node, ast.ImportFrom) or any(
            alias.asname != alias.name for alias in node.names
        ):
            raise ValueError(
                f"line {node.lineno}: a face holds `from file import X as X` only: "
                f"{ast.unparse(node)}"
            )
        names += [alias.name for alias in node.names]
    return names


def faces() -> dict[str, str]:
    """Reads the source of each face, by the name of its namespace."""
    found = sorted((ROOT / "jaxfp8").rglob("__init__.py"))
    return {".".join(path.parent.relative_to(ROOT).parts): path.read_text() for path in found}


FACES = faces()


@pytest.mark.parametrize("namespace", sorted({*FACES, *EXPECTED}))
def test_names(namespace):
    names = names_of(FACES.get(namespace, ""))
    expected = EXPECTED.get(namespace, "").split()
    assert sorted(names) == sorted(expected), (
        f"{namespace}: not in EXPECTED: {sorted({*names} - {*expected})}, gone: "
        f"{sorted({*expected} - {*names})}"
    )


def test_dir_is_the_face():
    names = set(EXPECTED["jaxfp8"].split()) - {"__version__"}
    assert set(dir(fp8)) == names
    assert len(names) <= 49


@pytest.mark.parametrize(
    ("namespace", "name"),
    [(namespace, name) for namespace, source in FACES.items() for name in names_of(source)],
)
def test_example(namespace, name):
    thing = getattr(importlib.import_module(namespace), name)
    if not callable(thing):
        return  # a module or a constant
    # __doc__ and not inspect.getdoc, which would lend a class the docstring of its base.
    doc = thing.__doc__ or ""
    assert doc.strip(), f"{namespace}.{name} has no docstring"
    raised_not_called = isinstance(thing, type) and issubclass(thing, Exception)
    assert ">>>" in doc or raised_not_called, f"{namespace}.{name} has no example (>>>)"


@pytest.mark.parametrize(
    "source",
    [
        "from a import *",
        "from a import b",
        "from a import b as c",
        "import a",
        "x = 1",
        "def f(): pass",
    ],
)
def test_a_face_that_does_more_is_refused(source):
    with pytest.raises(ValueError, match="a face holds"):
        names_of(f'"""Face."""\nfrom a import x as x\n{source}')
