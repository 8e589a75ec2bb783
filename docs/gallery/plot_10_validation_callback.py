"""
A validation callback in ten lines
==================================

A number to watch beside the accuracy after every epoch: how often would noise flip the network's answers? The callback
is a class with one method, which frameworks such as Lightning call; nothing of theirs is needed here.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import netmoments as nm


class NoiseCheck:
    """After each validation: the mean probability that noise flips an answer."""

    def __init__(self, images: torch.Tensor, std: float) -> None:
        self.noise, self.history = nm.Gaussian(images, std=std), []

    def on_validation_epoch_end(self, trainer: object, module: nn.Module) -> None:
        was_training, _ = module.training, module.eval()
        flips = nm.flip_probability(module, self.noise, absolute_error=0.05, runs=400)
        self.history.append(float(flips.probability.mean()))
        module.train(was_training)


# %%
# With Lightning, derive the class from ``lightning.Callback`` and pass it to ``Trainer(callbacks=[...])``. Here we
# write the loop ourselves.

torch.manual_seed(0)
train, test = nm.data.load("digits", split="train"), nm.data.load("digits")
network = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, 10)
)
check, accuracies = NoiseCheck(test.images[:16], std=0.2), []
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
for epoch in range(8):
    network.train()
    for batch in torch.randperm(len(train.images)).split(64):
        loss = nn.functional.cross_entropy(network(train.images[batch]), train.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    check.on_validation_epoch_end(None, network)
    accuracies.append(float((network.eval()(test.images).argmax(1) == test.labels).float().mean()))
    print(f"epoch {epoch}: accuracy {accuracies[-1]:.3f}, flipped by noise {check.history[-1]:.3f}")

# %%
# Both numbers over the epochs.

figure, panel = plt.subplots()
panel.plot(accuracies, "o-", label="accuracy without noise")
panel.plot(check.history, "s-", label="flipped by noise of σ = 0.2")
panel.set(xlabel="epoch")
panel.legend()
plt.show()
