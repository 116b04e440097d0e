"""`jaxfp8.plugs.levanter`: configs of models that quantize, and what is refused at the start."""

import dataclasses
import types
import warnings

import pytest

import jaxfp8 as fp8
from jaxfp8.plugs import levanter as plug

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("levanter", exc_type=ImportError)
    import equinox as eqx
    import haliax as hax
    import jax
    from levanter.models.lm_model import LmConfig
    from levanter.schedule import ScheduleStep

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore"),
]
SMALL = {"hidden_dim": 32, "intermediate_dim": 32, "num_layers": 2, "num_heads": 2}


def config(kind="llama", **fields):
    plug.register_models()
    return LmConfig.get_choice_class(f"jaxfp8_{kind}")(**SMALL, num_kv_heads=2, **fields)


def ops(model):
    nodes = jax.tree.leaves(model, is_leaf=lambda node: hasattr(node, "policy"))
    return [node for node in nodes if hasattr(node, "policy")]


def build(made):
    return eqx.filter_eval_shape(made.build, hax.Axis("vocab", 64), key=jax.random.key(0))


def test_every_model_has_a_config_and_again_changes_nothing():
    plug.register_models()
    before = dict(LmConfig.get_known_choices())
    plug.register_models()
    assert dict(LmConfig.get_known_choices()) == before
    plain = {name for name in before if not name.startswith("jaxfp8_")}
    assert {"llama", "mixtral", "qwen3_moe"} <= plain
    assert {f"jaxfp8_{name}" for name in plain} == before.keys() - plain


def test_a_model_is_quantized():
    made = build(config(recipe="delayed(history_length=4)"))
    (recipe,) = {op.policy.recipe for op in ops(made)}
    assert recipe == fp8.recipes.delayed(history_length=4)
    assert len(ops(made)) == 8  # 4 of attention, 3 of the MLP, and the head, in a scanned layer
    assert len(ops(build(config(recipe="current", targets=".*mlp.*")))) == 3


def test_init_of_the_model_type_quantizes():
    """levanter reads files of Hugging Face into what `model_type.init` makes."""
    made = config(recipe="current")
    model = eqx.filter_eval_shape(
        made.model_type.init, hax.Axis("vocab", 64), made, key=jax.random.key(0)
    )
    assert len(ops(model)) == 8


def test_a_wrong_recipe_is_an_error_of_the_config():
    with pytest.raises(ValueError, match=r"delay.*delayed"):
        config(recipe="delay")


@dataclasses.dataclass
class Trainer:
    """What `check_config` reads of a `TrainerConfig`."""

    quantization: object = None
    per_device_parallelism: int = -1
    train_batch_size: object = 8
    microbatch_size: int | None = None

    def initialize(self):
        if self.per_device_parallelism > 0:
            self.microbatch_size = self.per_device_parallelism * 2  # of 2 devices


def checked(recipe="delayed", kind="llama", **fields):
    trainer = Trainer(**{k: v for k, v in fields.items() if k in Trainer.__annotations__})
    others = {k: v for k, v in fields.items() if k not in Trainer.__annotations__}
    command = types.SimpleNamespace(model=config(kind, recipe=recipe), trainer=trainer, **others)
    plug.check_config(command)
    trainer.initialize()


BATCHES = {"fixed": 8, "scheduled": [ScheduleStep(0, 4), ScheduleStep(10, 8)]}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("recipe", "parallelism"), [("delayed", -1), ("delayed", 4), ("current", 2)]
)
def test_batches_of_one_piece_and_recipes_without_state_pass(recipe, parallelism, batch):
    checked(recipe, per_device_parallelism=parallelism, train_batch_size=BATCHES[batch])


@pytest.mark.parametrize("batch", BATCHES)
def test_microbatches_with_state_are_refused_at_the_start(batch):
    with pytest.raises(fp8.FP8StateError, match=r"per_device_parallelism=2 .*8.*4.*'delayed'.*-1"):
        checked(per_device_parallelism=2, train_batch_size=BATCHES[batch])


class LoraAdaptorConfig:
    """Named as levanter's."""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_hf_model_config": True}, "use_hf_model_config: true.*false"),
        ({"quantization": object()}, "trainer.quantization.*Remove"),
        ({"adapter": LoraAdaptorConfig()}, "LoraAdaptorConfig.*adapter.type: none"),
    ],
)
def test_what_would_lose_fp8_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        checked("current", **fields)


def test_models_without_fp8_are_not_checked():
    plain = LmConfig.get_choice_class("llama")(**SMALL, num_kv_heads=2)
    plug.check_config(types.SimpleNamespace(model=plain, trainer=None, use_hf_model_config=True))


def test_a_config_of_hugging_face_has_no_recipe():
    with pytest.raises(ValueError, match="no recipe for jaxfp8_llama"):
        type(config(recipe="current")).from_hf_config(None)
