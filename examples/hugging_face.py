"""An image model of Hugging Face transformers. No wrapper is needed: inputs go by name, the loss is the model's own."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import ifso

SMALL = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic", "num_labels": 10}


def loss_fn(model, batch):
    return model(**batch).loss


def main(folder="runs/hugging_face"):
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    batches = [{"pixel_values": images, "labels": labels}]  # as the collators of transformers make them
    model = ResNetForImageClassification(ResNetConfig(**SMALL))  # yours: .from_pretrained(NAME)
    result = ifso.prune(
        model,
        batches,
        loss_fn,
        budget=ifso.Budget(macs=0.5),
        example_inputs={"pixel_values": images[:1]},
    )
    print(result)
    ifso.save(model, folder)  # the weights that are left, and the recipe of their shapes
    model.config.save_pretrained(folder)  # config.json, that of the unpruned network
    fresh = ResNetForImageClassification(ResNetConfig.from_pretrained(folder))
    return model, ifso.load(folder, fresh)


if __name__ == "__main__":
    main()
