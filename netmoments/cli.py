"""The command line. Thin: every command imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter, validators

from netmoments import __version__

app = App(
    name="netmoments",
    help="What a trained ReLU network does under Gaussian noise, computed instead of sampled.",
    version=__version__,
)


@app.command
def demo(
    *,
    samples: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 10_000,
    seed: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
) -> None:
    """Show the engine: exact moments beside Monte Carlo, and the paper's series beside the exact kernel.

    Parameters
    ----------
    samples
        How many Monte Carlo samples to compare with.
    seed
        Seed of the random network, its input and the samples.
    """
    from rich.console import Console

    from netmoments.experiments import engine, figure_2

    console = Console()
    console.print(engine.draw(engine.run(engine.EngineConfig(samples=samples, seed=seed))))
    console.print()
    with console.status("the paper's grid, 441,000 points …"):
        comparison = figure_2.run()
    console.print(figure_2.draw(comparison))


def main() -> None:
    """Entry point of the `netmoments` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
