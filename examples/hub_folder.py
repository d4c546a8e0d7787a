"""A pruned network as a folder of four files that any hub takes; `python hub_folder.py OWNER/NAME` pushes it."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import ifso

FILES = ["README.md", "network.json", "recipe.json", "model.safetensors"]
CARD = "---\nlibrary_name: ifso\ntags: [pruning]\n---\n# {model}, {kept:.0%} of its MACs\n\nSee network.json.\n"


def write(folder, model="ifso:resnet8-digits"):
    batches = [(torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,)))]  # yours: trained weights, real data
    network, half = ifso.create_model(model), ifso.Budget(macs=0.5)
    loss_fn = lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    result = ifso.prune(network, batches, loss_fn, budget=half, example_inputs=batches[0][0][:1])
    ifso.save(network, folder)
    Path(folder, "network.json").write_text(json.dumps({"model": model}))
    Path(folder, "README.md").write_text(CARD.format(model=model, kept=result.shares["macs"]))
    return network


def read(folder):
    return ifso.load(folder, ifso.create_model(json.loads(Path(folder, "network.json").read_text())["model"]))


def push(folder, repo_id, api):
    api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=FILES)


if __name__ == "__main__":
    from huggingface_hub import HfApi

    write("runs/hub")
    push("runs/hub", sys.argv[1], HfApi())
