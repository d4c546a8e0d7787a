"""A network of timm, by name, pruned to half of its MACs, saved, and loaded into a fresh one of the same name."""

import torch
import torch.nn.functional as F

import ifso

NAME = "timm:test_efficientnet,num_classes=10"  # any name of timm; create_model(NAME, weights=FILE) for trained weights


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main(folder="runs/timm", name=NAME, size=64):
    batches = [(torch.randn(8, 3, size, size), torch.randint(0, 10, (8,)))]  # yours: a DataLoader
    model, half = ifso.create_model(name), ifso.Budget(macs=0.5)
    result = ifso.prune(model, batches, loss_fn, budget=half, example_inputs=batches[0][0][:1])
    print(result)
    ifso.save(model, folder)
    return model, ifso.load(folder, ifso.create_model(name))


if __name__ == "__main__":
    main()
