"""A config for Kauldron's own trainer: a small Gemma 2 on random tokens, in FP8.

    python -m kauldron.main --cfg=gemma_config.py --cfg.workdir=FOLDER --cfg.model.recipe=current

`gemma_parts.py` has what is called here.
"""

from kauldron import konfig

with konfig.imports():
    import gemma_parts
    import optax
    from kauldron import kd


def get_config():
    return kd.train.Trainer(
        seed=42,
        train_ds=kd.data.InMemoryPipeline(
            loader=gemma_parts.random_tokens, batch_size=4, shuffle=False
        ),
        model=gemma_parts.model(recipe="bfloat16", lora=0, order="convert last"),
        num_train_steps=5,  # it runs one more
        log_metrics_every=1,
        train_losses={
            "xentropy": gemma_parts.CrossEntropy(logits="preds.logits", labels="batch.target")
        },
        optimizer=optax.adamw(3e-3),
        trainstep=gemma_parts.TrainStep(),
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=4),
    )
