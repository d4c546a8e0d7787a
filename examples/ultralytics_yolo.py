"""A YOLO of ultralytics, pruned with its own loss, fine-tuned by its own trainer, exported by its own exporter."""

from ultralytics import YOLO
from ultralytics.nn.modules import C2f

import ifso


def keeping(yolo):
    """The trainer of this YOLO's task, with the network as it is: theirs would build it anew from its yaml file."""
    return type("Trainer", (yolo.task_map[yolo.task]["trainer"],), {"get_model": lambda *_, **__: yolo.model})


def calibration(trainer, images, size=8):
    """Batches as the trainer makes them, not augmented, and of them what the loss reads."""
    trainer.setup_model()
    trainer.set_model_attributes()
    loader = trainer.get_dataloader(trainer.data["train"], size, rank=-1, mode="val")
    batches = [trainer.preprocess_batch(batch) for batch, _ in zip(loader, range(0, images, size), strict=False)]
    return [{name: batch[name] for name in ("img", "cls", "bboxes", "batch_idx")} for batch in batches]


def loss_fn(model, batch):
    return model(batch)[0].sum() / len(batch["img"])


def main(weights, data, macs=0.7, images=256, **options):
    yolo = YOLO(weights)
    yolo.model.requires_grad_()  # their files hold networks that do not learn
    batches = calibration(keeping(yolo)(overrides={"model": weights, "data": data, **options}), images)
    print(ifso.prune(yolo.model, batches, loss_fn, budget=ifso.Budget(macs=macs), example_inputs=(batches[0],)))
    for block in yolo.model.modules():
        if isinstance(block, C2f):  # only the exporter reads this number
            block.c = block.cv1.conv.out_channels // 2
    yolo.train(trainer=keeping(yolo), data=data, **options)
    return yolo, yolo.export(format="onnx"), yolo.export(format="torchscript")


if __name__ == "__main__":
    main("best.pt", "data.yaml")  # trained by ultralytics, and what it was trained on
