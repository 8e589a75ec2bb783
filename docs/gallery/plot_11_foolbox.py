"""
Inside an attack library
========================

``nm.ExpectedLogits`` is a model like any other, so an attack library can attack the *expected* scores, which are what
the network says on average over the noise and not in one draw. This example uses Foolbox.
"""

import foolbox
import matplotlib.pyplot as plt
import torch

import netmoments as nm

torch.manual_seed(0)
network, data = nm.zoo.pretrained("digits"), nm.data.load("digits")
images, labels = data.images[:6], data.labels[:6]

SIGMA = 0.2
expected = nm.ExpectedLogits(network, SIGMA, method=nm.Sketch(probes=16)).eval()
models = {
    "the network": foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu"),
    "expected scores": foolbox.PyTorchModel(expected, bounds=(0, 1), device="cpu"),
}
attack = foolbox.attacks.LinfPGD(steps=15)

# %%
# The same attack, at the same sizes, is run on both models. The results are then judged under noise that neither attack
# has seen.


def fooled(adversarial: torch.Tensor) -> torch.Tensor:
    """The share of noisy draws of each image whose answer is not its label."""
    noise = SIGMA * torch.randn(500, *adversarial.shape, generator=torch.Generator().manual_seed(3))
    answers = network((adversarial + noise).flatten(0, 1)).argmax(1).reshape(500, -1)
    return (answers != labels).float().mean(0)


sizes = [0.06, 0.12, 0.18, 0.24]
figure, panel = plt.subplots()
for name, model in models.items():
    _, found, _ = attack(model, images, labels, epsilons=sizes)
    shares = [float(fooled(adversarial).mean()) for adversarial in found]
    panel.plot(sizes, shares, "o-", label=f"attack on {name}")
    print(f"{name}: fooled under noise {[round(share, 2) for share in shares]}")
panel.set(xlabel="ε of the attack (largest change of a pixel)", ylabel="noisy draws that are fooled")
panel.legend()
plt.show()

# %%
# The two are close here: where a network is nearly linear under the noise, its expected scores are its scores, and an
# attack on either finds the same. A library that uses ``model(images)`` as the scores needs nothing more: torchattacks
# and CleverHans are called the same way, with ``expected`` as the model. Giving ``at=images`` in place of a method
# linearizes once, at the images, as the paper does; ``method=nm.Layerwise()`` is tighter and slower.
