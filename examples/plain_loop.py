"""A plain PyTorch loop: train on the digits that come with ifso, halve the MACs, fine-tune, save, load."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import ifso
from ifso.data.digits import digits


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(model, loader, epochs, lr=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for batch in (batch for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def main(folder="runs/plain", epochs=2):
    data = digits()
    loader = DataLoader(TensorDataset(data.x_train, data.y_train), batch_size=64, shuffle=True)
    model = ifso.create_model("ifso:resnet8-digits")
    train(model, loader, epochs)
    print(ifso.prune(model, loader, loss_fn, budget=ifso.Budget(macs=0.5), example_inputs=data.x_test[:1]))
    train(model, loader, epochs)  # a new optimizer: the one from before holds momentum of the old shapes
    ifso.save(model, folder)
    smaller = ifso.load(folder, ifso.create_model("ifso:resnet8-digits")).eval()
    return (smaller(data.x_test).argmax(1) == data.y_test).float().mean().item()


if __name__ == "__main__":
    print(f"accuracy on the test digits, pruned and fine-tuned: {main():.1%}")
