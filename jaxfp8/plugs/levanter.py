"""levanter's own commands, with models in FP8. No line of levanter or of yours changes.

    python -m jaxfp8.plugs.levanter levanter.main.train_lm --config_path my.yaml

It is `python -m levanter.main.train_lm`, whose configs know one more kind of each model:

    model:
      type: jaxfp8_llama
      recipe: delayed
      hidden_dim: 4096
"""

import dataclasses
import functools
import importlib
import inspect
import sys
from typing import Any

from jaxfp8._typing import FP8StateError
from jaxfp8.plugs._policy import import_guest
from jaxfp8.plugs.haliax import quantize_linear_layers
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.recipes._text import parse

PREFIX = "jaxfp8_"  # of the `type` of a model in a config


def register_models() -> None:
    """Give levanter a config `jaxfp8_NAME` for each config NAME of its models.

    It has two fields more. `recipe` is a text for `fp8.recipes.parse`. `targets` is that of
    `fp8_haliax.quantize_linear_layers`, as a regular expression. A second call changes nothing.

    Raises:
      ImportError: if levanter is not installed.

    Example:
      .. code-block:: python

        fp8_levanter.register_models()
        levanter.config.main(my_main)()  # a command of your own
    """
    lm_config = import_guest("levanter.models.lm_model", "marin-levanter").LmConfig
    for name, config in list(lm_config.get_known_choices().items()):
        if not name.startswith(PREFIX) and PREFIX + name not in lm_config.get_known_choices():
            lm_config.register_subclass(PREFIX + name, _quantized_config(name, config))


def check_config(config: Any) -> None:
    """Raise an error if levanter would train a model of `jaxfp8_NAME` in another way than asked.

    A model that the trainer does not make from its config would lose FP8. Call it first in a
    command of your own. `python -m jaxfp8.plugs.levanter` does.

    Args:
      config: that of a command, such as levanter's `TrainLmConfig`.

    Raises:
      FP8StateError: when the trainer is initialized, if it splits batches into microbatches and the
        recipe has state.
      ValueError: if the config has `trainer.quantization`, `use_hf_model_config`, or an adapter.

    Example:
      .. code-block:: python

        def main(config: TrainLmConfig):
            fp8_levanter.check_config(config)
            train_lm.main(config)
    """
    model: Any = getattr(config, "model", None)
    trainer: Any = getattr(config, "trainer", None)
    kind = getattr(model, "quantizes", None)
    if kind is None:
        return
    if getattr(config, "use_hf_model_config", False):
        raise ValueError(
            f"use_hf_model_config: true replaces the model {PREFIX}{kind} by a plain {kind}, "
            "without FP8. Set it to false, and write the fields of the model into the config."
        )
    adapter = getattr(config, "adapter", None)
    if adapter is not None and not type(adapter).__name__.startswith("NoAdaptor"):
        raise ValueError(
            f"adapter: {type(adapter).__name__} trains some parameters only, and the model "
            f"{PREFIX}{kind} has quantized layers whose adapters are not. Set adapter.type: none, "
            f"or model.type: {kind}."
        )
    if trainer is None:
        return
    if trainer.quantization is not None:
        raise ValueError(
            f"trainer.quantization replaces the operations of model {PREFIX}{kind} by those of "
            f"haliax. Remove quantization, or set model.type: {kind}."
        )
    if parse(model.recipe).rows:
        trainer.initialize = functools.partial(
            _initialize, trainer, trainer.initialize, model.recipe
        )


def _initialize(trainer: Any, initialize: Any, recipe: str) -> None:
    """levanter's `TrainerConfig.initialize`, then the check of microbatches.

    Only then levanter knows how many devices there are.
    """
    initialize()
    size, batch = trainer.microbatch_size, trainer.train_batch_size
    sizes = [batch] if isinstance(batch, int) else [each.value for each in batch]  # or a schedule
    if size is not None and size < max(sizes):
        raise FP8StateError(
            f"per_device_parallelism={trainer.per_device_parallelism} splits train_batch_size="
            f"{batch} into microbatches of {size}, but recipe {recipe!r} has "
            "quantizer state, of which levanter would keep a part. Set per_device_parallelism: -1, "
            "or take a recipe without state, such as current."
        )


def _quantized_config(name: str, config: Any) -> type:
    """A subclass of the config of a model, whose models have FP8."""

    def model_type(given: Any) -> type:
        return _quantized_model(config.model_type.fget(given))

    def from_hf_config(kind: type, hf_config: Any) -> Any:
        raise ValueError(
            f"a config of Hugging Face has no recipe for {PREFIX}{name}. Write the fields of the "
            "model into the config of levanter."
        )

    def post_init(given: Any) -> None:
        if hasattr(config, "__post_init__"):
            config.__post_init__(given)
        parse(given.recipe)  # a wrong text is an error before anything runs

    made = dataclasses.make_dataclass(
        f"FP8{config.__name__}",
        [
            ("recipe", str, dataclasses.field(kw_only=True)),
            ("targets", str | None, dataclasses.field(default=None, kw_only=True)),
        ],
        bases=(config,),
        frozen=True,
        namespace={
            "__module__": __name__,
            "__post_init__": post_init,
            "quantizes": name,
            "model_type": property(model_type),
            "from_hf_config": classmethod(from_hf_config),
        },
    )
    return made


@functools.cache
def _quantized_model(model: Any) -> type:
    """A subclass of a model whose `init` quantizes.

    levanter makes models by `init`, also when it reads files of Hugging Face.
    """

    class Quantized(model):
        @classmethod
        def init(cls, Vocab: Any, config: Any, *, key: Any) -> Any:
            recipe: Recipe = parse(config.recipe)
            made = model.init(Vocab, config, key=key)
            return quantize_linear_layers(made, recipe, targets=config.targets)

    return Quantized


def main(arguments: list[str]) -> None:
    """Run the command whose module is the first argument, as `python -m` does."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit(
            "usage: python -m jaxfp8.plugs.levanter MODULE [ARGUMENT ...]\n"
            "MODULE is a command of levanter, such as levanter.main.train_lm"
        )
    import_guest("levanter", "marin-levanter")
    register_models()
    command = importlib.import_module(arguments[0]).main
    config_class = next(iter(inspect.signature(command).parameters.values())).annotation

    def checked(config: Any) -> Any:
        check_config(config)
        return command(config)

    checked.__annotations__ = {"config": config_class}
    importlib.import_module("levanter.config").main(checked, args=arguments[1:])()


if __name__ == "__main__":
    main(sys.argv[1:])
