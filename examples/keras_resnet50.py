"""A network of your own for the command line: --model examples/keras_resnet50.py:resnet50

ResNet-50 as Keras has it, with torchvision's names: the first block of a stage strides in its first convolution, and
batch norms have another epsilon. Weights that were converted from Keras are right only in this network.
"""

import torchvision
from torch import nn

EPSILON = 1e-3


def resnet50(num_classes=1000):
    model = torchvision.models.resnet50(weights=None, num_classes=num_classes)
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = EPSILON
    return model
