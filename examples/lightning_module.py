"""A Lightning module that prunes itself after the first epoch; the same Trainer then fine-tunes what is left."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import ifso
from ifso.data.digits import digits


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = ifso.create_model("ifso:resnet8-digits")

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch):  # of a module and a batch, the mean loss: just what ifso asks for
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            options = {"budget": ifso.Budget(macs=0.5), "example_inputs": torch.zeros(1, 1, 8, 8)}
            ifso.prune(self, self.trainer.train_dataloader, Classifier.training_step, **options)
            self.optimizers().optimizer.state.clear()  # momentum has the old shapes; parameters are the same objects


def main(**options):
    *train, images, labels = digits()
    module, batches = Classifier(), DataLoader(TensorDataset(*train), batch_size=64, shuffle=True)
    pl.Trainer(max_epochs=2, accelerator="cpu", **options).fit(module, batches)
    return module, (module.eval()(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    print(f"accuracy, pruned and fine-tuned: {main()[1]:.1%}")
