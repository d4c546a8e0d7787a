"""A network of torchvision, by name, pruned step by step: trace, score, choose, look at the cost, remove."""

import torch
import torch.nn.functional as F

import ifso

NAME = "torchvision:resnet18"  # any classifier of torchvision; weights="resnet18.pth" gives it trained ones


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main(folder="runs/torchvision", name=NAME, size=64):
    batches = [(torch.randn(8, 3, size, size), torch.randint(0, 1000, (8,)))]  # yours: a DataLoader
    model = ifso.create_model(name).eval()  # batch norms score with the statistics they have
    graph = ifso.trace(model, batches[0][0][:1])
    print(graph)
    scores = ifso.score(model, graph, loss_fn, batches)
    keep = {group: score > score.quantile(0.3) for group, score in scores.items()}  # True stays
    keep = ifso.balance(graph, keep)
    print(f"{ifso.cost(model, graph, keep).macs / ifso.cost(model, graph).macs:.1%} of the MACs stay")
    ifso.compact_(model, graph, keep)
    ifso.save(model, folder)
    return model, ifso.load(folder, ifso.create_model(name))


if __name__ == "__main__":
    main()
