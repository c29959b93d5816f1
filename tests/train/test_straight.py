"""Large linear layers write gradients straight to their place: the bits of autograd, and only when it is theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from manyhands.train.straight import straighten

pytestmark = pytest.mark.usefixtures("one_thread")


class Places:
    """Gradient buffers by the number of the parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.collecting = True
        self.names = [name for name, _ in model.named_parameters()]
        self.targets = [torch.full_like(parameter, 77.0) for parameter in model.parameters()]
        self.written: list[int] = []
        straighten(model, self.names, self)

    def take_product(self, index: int, of_outputs: torch.Tensor, inputs: torch.Tensor) -> bool:
        if index in self.written:
            return False
        self.written.append(index)
        torch.mm(of_outputs.t(), inputs, out=self.targets[index])
        return True


class Net(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(300, 1000, bias=bias)
        self.second = nn.Linear(1000, 700, bias=bias)
        self.last = nn.Linear(700, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.second(torch.relu(self.first(x)))))
        return out


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", [(64, 300), (5, 300), (1, 300), (4, 6, 300)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_bits_are_those_of_autograd(shape: tuple[int, ...], bias: bool) -> None:
    plain, model = Net(bias=bias), Net(bias=bias)
    places = Places(model)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    outputs = [net(x) for net in (plain, model)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    expected, found = gradients(plain), gradients(model)
    assert [places.names[index] for index in places.written] == ["second.weight", "first.weight"]
    for index, name in enumerate(places.names):
        straight = index in places.written
        assert (found[name] is None) == straight
        assert torch.equal(places.targets[index] if straight else found[name], expected[name]), name


def test_a_second_backward_comes_the_usual_way() -> None:
    plain, model = Net(), Net()
    places = Places(model)
    x = torch.randn(8, 300)
    for net in (plain, model):
        net(x).sum().backward()
    before = places.targets[0].clone()
    model(x).sum().backward()
    assert torch.equal(places.targets[0], before)
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)


def test_somebody_who_asks_for_gradients_gets_them() -> None:
    plain, model = Net(), Net()
    places = Places(model)
    x = torch.randn(8, 300, requires_grad=True)

    def penalty(net: nn.Module) -> torch.Tensor:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return slope.square().mean()

    for net in (plain, model):
        penalty(net).backward()
    assert torch.allclose(model.last.weight.grad, plain.last.weight.grad)
    places.collecting = False
    asked = [torch.autograd.grad(net(x).sum(), list(net.parameters())) for net in (plain, model)]
    assert all(torch.equal(one, other) for one, other in zip(*asked, strict=True))


def test_bf16_goes_the_usual_way() -> None:
    model = Net()
    places = Places(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 300)).sum().backward()
    assert not places.written
    assert model.first.weight.grad is not None


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    net[1].weight = net[0].weight
    return net


def replaced() -> nn.Module:
    net = nn.Linear(600, 600)
    net.forward = lambda x: x + 1  # type: ignore[method-assign]
    return net


@pytest.mark.parametrize(
    "make", [lambda: Own(600, 600), tied, replaced, lambda: nn.Linear(20, 20), lambda: nn.Linear(600, 600).double()]
)
def test_what_is_left_alone(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = [vars(module).get("forward") for module in model.modules()]
    Places(model)
    assert [vars(module).get("forward") for module in model.modules()] == before


def test_torch_func_and_forward_mode_see_the_plain_layer() -> None:
    plain, model = Net(), Net()
    Places(model)
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    tangent = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    for transform in (
        lambda net: torch.func.vmap(net)(x),
        lambda net: torch.func.jvp(net, (x,), (tangent,))[1],
        lambda net: torch.func.jacrev(net)(x[0]),
        lambda net: forward_mode(net, x, tangent),
    ):
        assert torch.allclose(transform(model), transform(plain))


def forward_mode(net: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, tangent))).tangent.clone()
