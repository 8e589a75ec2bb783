"""One self-contained HTML page for an attack: no scripts, nothing fetched."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from netmoments.experiments.attack_pictures import HEADINGS
from netmoments.report.attack_method import headline_in_words, method_in_words
from netmoments.report.attack_study import AttackStudy
from netmoments.report.attack_wording import (
    answers_in_words,
    asked_in_words,
    clipped_in_words,
    followed_in_words,
    gap_in_words,
    in_grey_levels,
    size_in_words,
    success_in_words,
    verdict_in_words,
)
from netmoments.report.pictures import png_data
from netmoments.report.provenance import Provenance
from netmoments.report.templating import render


def render_attack_page(found: AttackStudy, provenance: Provenance, model: str, data: str) -> str:
    """The page as text."""
    return render(
        "attack.html",
        title=f"Noise made to fool {model}",
        headline=f"{headline_in_words(found.attack)} {model}",
        subtitle=f"{len(found)} images of {data}, {provenance.date}",
        answers=answers_in_words(found),
        facts=_facts(found),
        cases=attacked_cases(found),
        left_out=[*found.left_out, *((item.path, item.reason) for item in found.images.skipped)],
        method=method_in_words(found),
        provenance=list(asdict(provenance).items()),
    )


def attacked_cases(found: AttackStudy) -> list[dict[str, Any]]:
    """What `attacked.html` shows of each image."""
    return [_case(found, number) for number in range(len(found))]


def _facts(found: AttackStudy) -> list[dict[str, str]]:
    """The whole in four numbers."""
    result = found.result
    return [
        {
            "value": f"{found.fooled} of {len(found)}",
            "meaning": f"images fooled as asked: {asked_in_words(found.attack)}",
        },
        {"value": f"{float(result.success.rate.mean()):.1%}", "meaning": "of all noisy copies fooled the network"},
        {"value": f"{float(result.sparsity.mean()):.0%}", "meaning": "of the pixels not changed by μ, on average"},
        {
            "value": in_grey_levels(float(result.linf.median())),
            "meaning": "grey levels, the largest |μ| of the median image",
        },
    ]


def _case(found: AttackStudy, number: int) -> dict[str, Any]:
    result = found.result
    label, sampled = found.class_name(result.labels[number]), found.class_name(found.noisy_classes[number])
    row = found.row(number)
    captions = (label, f"up to {in_grey_levels(float(result.linf[number]))} grey levels", "brighter", "darker", sampled)
    pictures = [
        {"data": png_data(panel), "heading": heading, "caption": caption}
        for panel, heading, caption in zip(row.panels(), HEADINGS, captions, strict=True)
    ]
    return {
        "name": found.name(number),
        "label": label,
        "changed": int(found.noisy_classes[number]) != int(result.labels[number]),
        "fooled": bool(result.fooled[number]),
        "verdict": verdict_in_words(found, number),
        "pictures": pictures,
        "facts": _case_facts(found, number),
    }


def _case_facts(found: AttackStudy, number: int) -> list[tuple[str, str]]:
    result = found.result
    return [
        ("samples fooled", success_in_words(found, number)),
        ("clipped to [0, 1]", clipped_in_words(found, number)),
        ("most often taken for", found.class_name(result.answers[number])),
        ("made towards", found.class_name(result.towards[number])),
        ("pixels not changed", f"{float(result.sparsity[number]):.0%}"),
        ("‖μ‖₁ + TV, grey levels", size_in_words(found, number)),
        ("σ, grey levels", in_grey_levels(float(result.sigma[number]))),
        ("SSIM", f"{float(result.ssim[number]):.3f}"),
        ("gap", gap_in_words(found, number)),
        ("network followed", followed_in_words(found, number)),
    ]
