"""Convolutional networks: plain, residual, concatenated, depthwise, grouped, transposed, with channel attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvBN(nn.Module):
    """Convolution without bias, batch norm and, unless told otherwise, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, relu: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return F.relu(x) if self.relu else x


class Head(nn.Module):
    """Global average pooling and a linear layer of five outputs."""

    def __init__(self, inputs: int):
        super().__init__()
        self.fc = nn.Linear(inputs, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


class Chain(nn.Sequential):
    """Named layers one after the other."""

    def __init__(self, **layers: nn.Module):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def plain() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), body=ConvBN(8, 6), head=Head(6))


class Block(nn.Module):
    """relu(shortcut(x) + f(x))."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = ConvBN(inputs, hidden, stride=stride)
        self.conv2 = ConvBN(hidden, outputs, relu=False)
        self.shortcut = nn.Identity() if stride == 1 else ConvBN(inputs, outputs, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(self.conv1(x)) + self.shortcut(x))


def residual() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), block1=Block(8, 6, 8), block2=Block(8, 6, 12), head=Head(12))


class PreActivation(nn.Module):
    """x + f(relu(bn(x))), with a last batch norm after the trunk."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.last = nn.BatchNorm2d(8)
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.conv1(F.relu(self.bn1(x)))
        x = x + self.conv2(F.relu(self.bn2(inner)))
        return self.head(F.relu(self.last(x)))


class Dense(nn.Module):
    """DenseNet: every layer reads all before it; the joined channels share one batch norm."""

    def __init__(self):
        super().__init__()
        self.stem, self.layer1, self.layer2 = ConvBN(3, 6), ConvBN(6, 4), ConvBN(10, 4)
        self.norm = nn.BatchNorm2d(14)
        self.transition = nn.Conv2d(14, 8, 1, bias=False)
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.layer1(x)], 1)
        x = torch.cat([x, self.layer2(x)], 1)
        return self.head(self.transition(F.relu(self.norm(x))))


class WithInput(nn.Module):
    """Features beside the image itself (dense prediction): the image's channels must stay."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = ConvBN(3, 8), ConvBN(11, 6)
        self.head = Head(6)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(torch.cat([image, self.stem(image)], 1)))


def depthwise() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 8), dw=ConvBN(8, 8, groups=8), wide=ConvBN(8, 16, groups=8), pw=ConvBN(16, 6, 1), head=Head(6)
    )


def grouped() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), gconv=ConvBN(8, 12, groups=4), body=ConvBN(12, 6), head=Head(6))


def grouped_chain() -> nn.Module:
    """Blocks of 2, then 3 within 6 (nested), then 6 across 4 (overlapping)."""
    return Chain(
        stem=ConvBN(3, 8),
        g4=ConvBN(8, 12, groups=4),
        g2=ConvBN(12, 12, groups=2),
        g3=ConvBN(12, 12, groups=3),
        head=Head(12),
    )


class GroupedResidual(nn.Module):
    """ResNeXt: the trunk is read by a dense layer, the grouped layer lies inside the branch."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBN(3, 8)
        self.conv1, self.conv2, self.conv3 = ConvBN(8, 12, 1), ConvBN(12, 12, groups=3), ConvBN(12, 8, 1, relu=False)
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.conv3(self.conv2(self.conv1(x)))))


class GroupedWithInput(nn.Module):
    """The input beside features, read in two groups: half of the first group must stay."""

    def __init__(self):
        super().__init__()
        self.stem, self.gconv, self.head = ConvBN(2, 6), ConvBN(8, 8, groups=2), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gconv(torch.cat([x, self.stem(x)], 1)))


class GroupedInput(nn.Module):
    """Grouped convolution that reads the model's input: its input axis has no channels to lose."""

    def __init__(self):
        super().__init__()
        self.gconv = ConvBN(4, 8, groups=2)
        self.body, self.head = ConvBN(8, 6), Head(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.gconv(x)))


def transposed() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 8, stride=2),
        up=nn.ConvTranspose2d(8, 6, 2, 2),
        relu=nn.ReLU(),
        last=nn.Conv2d(6, 3, 3, padding=1),
    )


def transposed_grouped() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 8, stride=2), up=nn.ConvTranspose2d(8, 12, 2, 2, groups=4), bn=nn.BatchNorm2d(12),
        relu=nn.ReLU(), last=nn.Conv2d(12, 3, 3, padding=1),
    )  # fmt: skip


def transposed_depthwise() -> nn.Module:
    return Chain(
        stem=ConvBN(3, 8, stride=2), up=nn.ConvTranspose2d(8, 8, 2, 2, groups=8), bn=nn.BatchNorm2d(8),
        relu=nn.ReLU(), last=nn.Conv2d(8, 3, 3, padding=1),
    )  # fmt: skip


class UNet(nn.Module):
    """Down, up, and the skipped features beside the upsampled ones."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = ConvBN(3, 6), ConvBN(6, 8)
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.join = ConvBN(12, 6)
        self.last = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        deep = self.down2(F.max_pool2d(skip, 2))
        return self.last(self.join(torch.cat([skip, self.up(deep)], 1)))


class SqueezeExcite(nn.Module):
    """x · σ(excite(relu(squeeze(mean x))))."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


def squeeze_excite() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), se=SqueezeExcite(8, 4), body=ConvBN(8, 6), head=Head(6))


class LinearSqueezeExcite(nn.Module):
    """The older form with linear layers and views that name the number of channels."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.squeeze, self.excite = nn.Linear(channels, hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels = x.shape[:2]
        gate = F.adaptive_avg_pool2d(x, 1).view(batch, channels)
        gate = self.excite(F.relu(self.squeeze(gate))).sigmoid().view(batch, channels, 1, 1)
        return x * gate.expand_as(x)


def squeeze_excite_linear() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), se=LinearSqueezeExcite(8, 4), body=ConvBN(8, 6), head=Head(6))


class CBAM(nn.Module):
    """Channel gate from mean and max over positions (one MLP for both), spatial gate from those over channels."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))
        self.spatial = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3)))
        x = x * gate.sigmoid()[:, :, None, None]
        over_channels = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)
        return x * self.spatial(over_channels).sigmoid()


def cbam() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), cbam=CBAM(8, 4), body=ConvBN(8, 6), head=Head(6))


class ECA(nn.Module):
    """Channel gate by a convolution along the channel axis: neighbours matter, so the channels must stay."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.conv(x.mean((2, 3))[:, None]).sigmoid()
        return x * gate.transpose(1, 2)[..., None]


def eca() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), eca=ECA(), body=ConvBN(8, 6), head=Head(6))


class AlongChannels(nn.Module):
    """The means of the channels as a signal of their own: a convolution runs along them, and its output is pooled."""

    def __init__(self):
        super().__init__()
        self.stem, self.along, self.fc = ConvBN(3, 8), nn.Conv1d(1, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.along(self.stem(x).mean((2, 3))[:, None])).mean(2))


class ChannelsAsBatch(nn.Module):
    """Every channel goes through the same small convolution, as an image of its own."""

    def __init__(self):
        super().__init__()
        self.stem, self.small, self.fc = ConvBN(3, 8), nn.Conv2d(1, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        batch, channels, height, width = x.shape
        x = F.relu(self.small(x.reshape(batch * channels, 1, height, width))).mean((2, 3))
        return self.fc(x.view(batch, channels, 4).mean(1))


class FPN(nn.Module):
    """Three levels, top-down sums, and one tower with group norm and two predictors shared by all levels."""

    def __init__(self):
        super().__init__()
        self.s1, self.s2, self.s3 = ConvBN(3, 6, stride=2), ConvBN(6, 8, stride=2), ConvBN(8, 10, stride=2)
        self.l1, self.l2, self.l3 = (nn.Conv2d(width, 8, 1) for width in (6, 8, 10))
        self.o1, self.o2, self.o3 = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.tower, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.cls, self.box = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        c1 = self.s1(x)
        c2 = self.s2(c1)
        c3 = self.s3(c2)
        p3 = self.l3(c3)
        p2 = self.l2(c2) + F.interpolate(p3, scale_factor=2.0)
        p1 = self.l1(c1) + F.interpolate(p2, scale_factor=2.0)
        features = [F.relu(self.norm(self.tower(o))) for o in (self.o1(p1), self.o2(p2), self.o3(p3))]
        return [(self.cls(feature), self.box(feature)) for feature in features]


class SharedTwice(nn.Module):
    """One convolution used twice in a row: what it reads and what it makes are the same channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.shared, self.head = ConvBN(3, 8), nn.Conv2d(8, 8, 3, padding=1), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.shared(F.relu(self.shared(x)))))


class Siamese(nn.Module):
    """Two positional inputs through one trunk, compared by subtraction."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(8, 6), Head(6)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head((self.body(self.stem(left)) - self.body(self.stem(right))).abs())


def prelu() -> nn.Module:
    return Chain(conv1=nn.Conv2d(3, 8, 3), act1=nn.PReLU(8), conv2=nn.Conv2d(8, 6, 3), act2=nn.PReLU(), head=Head(6))


def group_norm() -> nn.Module:
    return Chain(
        conv1=nn.Conv2d(3, 8, 3), norm1=nn.GroupNorm(2, 8), relu=nn.ReLU(), conv2=nn.Conv2d(8, 6, 3),
        norm2=nn.GroupNorm(1, 6), conv3=nn.Conv2d(6, 6, 3), norm3=nn.GroupNorm(6, 6), head=Head(6),
    )  # fmt: skip


def instance_norm() -> nn.Module:
    return Chain(
        conv1=nn.Conv2d(3, 8, 3), norm1=nn.InstanceNorm2d(8, affine=True, track_running_stats=True), relu=nn.ReLU(),
        conv2=nn.Conv2d(8, 6, 3), norm2=nn.InstanceNorm2d(6), act=nn.Sigmoid(), head=Head(6),
    )  # fmt: skip


class NormsWithoutGains(nn.Module):
    """Norms that have no parameters of their own; their numbers must follow the channels all the same."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3, self.conv4 = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8, 8))
        self.batch, self.group = nn.BatchNorm2d(8, affine=False), nn.GroupNorm(2, 8, affine=False)
        self.instance, self.layer = nn.InstanceNorm2d(8), nn.LayerNorm(8, elementwise_affine=False)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch(self.conv1(x)))
        x = F.relu(self.group(self.conv2(x)))
        x = F.relu(self.instance(self.conv3(x)))
        return self.fc(self.layer(self.conv4(x).mean((2, 3))))


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 3, groups=2), nn.AdaptiveMaxPool1d(1),
        nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.AvgPool3d(2), nn.Conv3d(8, 6, 1, bias=False),
        nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip


def weight_norm() -> nn.Module:
    from torch.nn.utils import parametrizations

    return Chain(
        stem=parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), relu=nn.ReLU(),
        body=parametrizations.weight_norm(nn.Conv2d(8, 6, 3)), last=ConvBN(6, 6), head=Head(6),
    )  # fmt: skip


def weight_norm_hooked() -> nn.Module:
    """The older kind: a hook makes the weight before each run. One layer is transposed, with gains along its inputs."""
    from torch.nn.utils import weight_norm as hooked

    net = Chain(
        stem=hooked(nn.Conv2d(3, 8, 3)), relu=nn.ReLU(), body=hooked(nn.Conv2d(8, 6, 3)), last=nn.ReLU(),
        up=hooked(nn.ConvTranspose2d(6, 4, 2, 2)), act=nn.ReLU(), head=Head(4),
    )  # fmt: skip
    with torch.no_grad():  # what the hook makes with a gradient cannot be copied
        net(torch.zeros(1, 3, 8, 8))
    return net


class GatedDilated(nn.Module):
    """WaveNet: weight-normed dilated convolutions, tanh times sigmoid of two halves, residual and skip sums."""

    def __init__(self):
        super().__init__()
        from torch.nn.utils.parametrizations import weight_norm as normed

        self.stem, self.out = normed(nn.Conv1d(3, 8, 1)), normed(nn.Conv1d(6, 5, 1))
        self.gates = nn.ModuleList(normed(nn.Conv1d(8, 12, 2, dilation=d, padding=d)) for d in (1, 2))
        self.residuals = nn.ModuleList(normed(nn.Conv1d(6, 8, 1)) for _ in range(2))
        self.skips = nn.ModuleList(normed(nn.Conv1d(6, 6, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        length, total = x.shape[-1], None
        x = self.stem(x)
        for gate, residual, skip in zip(self.gates, self.residuals, self.skips, strict=True):
            signal, opening = gate(x)[..., :length].chunk(2, 1)
            y = signal.tanh() * opening.sigmoid()
            total = skip(y) if total is None else total + skip(y)
            x = x + residual(y)
        return self.out(F.relu(total))


class StandardisedConv(nn.Conv2d):
    """Convolution with the weight of each output channel brought to mean 0 and deviation 1, as written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        deviation = self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (deviation + 1e-5), self.bias, self.stride, self.padding)


class StandardisedByBatchNorm(nn.Conv2d):
    """The same through ``F.batch_norm`` on the flattened weight, with a gain, as timm does it."""

    def __init__(self, inputs: int, outputs: int, kernel: int):
        super().__init__(inputs, outputs, kernel)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, weight=self.gain.view(-1), training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


def weight_standardised() -> nn.Module:
    return Chain(
        stem=StandardisedConv(3, 8, 3), relu=nn.ReLU(), body=StandardisedConv(8, 6, 3), relu2=nn.ReLU(), head=Head(6)
    )


def weight_standardised_batch_norm() -> nn.Module:
    return Chain(
        stem=StandardisedByBatchNorm(3, 8, 3), relu=nn.ReLU(), body=StandardisedByBatchNorm(8, 6, 3), head=Head(6)
    )


class Im2Col(nn.Module):
    """A convolution written as unfold and a matrix product."""

    def __init__(self):
        super().__init__()
        self.stem, self.mix, self.last = ConvBN(3, 4), nn.Linear(36, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(self.stem(x), 3, padding=1).transpose(1, 2)
        return self.last(F.relu(self.mix(columns)))


class ResponseNorm(nn.Module):
    """ConvNeXt V2's global response norm: each channel's length against the mean length over channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(1, channels, 1, 1)), nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
        share = length / (length.mean(1, keepdim=True) + 1e-6)
        return self.gain * (x * share) + self.bias + x


def response_norm() -> nn.Module:
    return Chain(stem=ConvBN(3, 8), grn=ResponseNorm(8), body=ConvBN(8, 6), head=Head(6))


class ChannelSoftmax(nn.Module):
    """Softmax over the channels themselves."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = ConvBN(3, 8), ConvBN(8, 6), Head(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x).softmax(1)))
