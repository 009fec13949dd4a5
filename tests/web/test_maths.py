"""Mathematics in answers: drawn as MathML where it is understood, and never changed where it is not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .acts import ask
from .fake_server import FakeServer

DRAWN = {
    r"E = mc^2": "<mi>E</mi><mo>=</mo><mi>m</mi><msup><mi>c</mi><mn>2</mn></msup>",
    r"\frac{a+1}{2}": "<mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><mn>2</mn></mfrac>",
    r"\frac12": "<mfrac><mn>1</mn><mn>2</mn></mfrac>",
    r"\sqrt[3]{x}": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    r"x_i^{n}": "<msubsup><mi>x</mi><mi>i</mi><mi>n</mi></msubsup>",
    r"f''": "<msup><mi>f</mi><mo>′′</mo></msup>",
    r"\alpha*\beta": "<mi>α</mi><mo>∗</mo><mi>β</mi>",
    r"\text{if } x": "<mtext>if&nbsp;</mtext><mi>x</mi>",
    r"\mathbb{R}^n": "<msup><mi>ℝ</mi><mi>n</mi></msup>",
    r"\hat{y}": '<mover accent="true"><mi>y</mi><mo stretchy="false">^</mo></mover>',
    r"a \not= b": "<mo>=\u0338</mo>",
}
UNDERSTOOD = [
    r"\sum_{i=1}^{n} i = \frac{n(n+1)}{2}",
    r"\int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2}",
    r"\lim_{x \to 0} \frac{\sin x}{x} = 1",
    r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}",
    r"f(x) = \begin{cases} 0 & \text{if } x < 0 \\ 1 & \text{otherwise} \end{cases}",
    r"\begin{aligned} a &= b \\[4pt] &= c \end{aligned}",
    r"\left( \frac{1}{2} \middle| x \right]",
    r"\mathrm{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)V",
    r"\nabla \cdot \mathbf{E} = \frac{\rho}{\varepsilon_0}",
    r"\binom{n}{k} \bmod p, \quad a \equiv b \pmod{n}",
    r"P(A \mid B) = \{x : x \in \mathcal{X}\}",
    r"\underbrace{a + b}_{\text{sum}} \xrightarrow{f} \overline{z}",
    r"\operatorname*{arg\,max}_\theta \; \log p_\theta(x)",
]


def convert(page: Any, sources: list[str]) -> list[str | None]:
    script = """async (some) => {
        const { mathNode } = await import("./tex.js");
        return some.map((source) => mathNode(source, false)?.outerHTML ?? null);
    }"""
    found: list[str | None] = page.evaluate(script, sources)
    return found


def test_formulas_become_elements(functions: Any) -> None:
    found = convert(functions, [*DRAWN, *UNDERSTOOD])
    for (source, part), html in zip(DRAWN.items(), found, strict=False):
        assert html is not None and part in html, (source, html)
    assert [source for source, html in zip(UNDERSTOOD, found[len(DRAWN) :], strict=True) if html is None] == []


def test_what_is_not_understood_is_refused_and_nothing_raises(functions: Any) -> None:
    unclosed = [r"\frac{1}", "{x", "x}", r"\left( x", r"\begin{matrix} a", "{" * 5000]
    bad = [*unclosed, r"\unknown{x}", "a & b", r"\begin{nothing}x\end{nothing}"]
    assert convert(functions, bad) == [None] * len(bad)
    draw = random.Random(0)
    words = r"\frac \sqrt \left \right \begin{cases} \end{cases} { } ^ _ & \\ x 12 ( | \text{a} \sum ' $ % <b> \not \big \limits"
    pieces = [*words.split(" "), " "]
    convert(functions, ["".join(draw.choices(pieces, k=30)) for _ in range(2000)])


@pytest.mark.parametrize(
    ("text", "shown", "formulas"),
    [
        (r"Energy \(E = mc^2\) is", "Energy E=mc2 is", 1),
        ("\\[\nx_1 + x_2\n\\]", "x1+x2", 1),
        ("So:\n$$\n\\frac{a}{b}\n$$\nand on", None, 1),
        ("inline $a_1$ and $b$.", "inline a1 and b.", 2),
        ("It costs $5, or $10 with $x.", "It costs $5, or $10 with $x.", 0),
        (r"Unknown \(\foo_{a}*b*\) stays", r"Unknown \(\foo_{a}*b*\) stays", 0),
        (r"open \( still", r"open \( still", 0),
        ("code `\\(x\\)` stays", r"code \(x\) stays", 0),
        ("- item \\(x^2\\)\n- **bold \\(y\\)**", None, 2),
        ("\\begin{align}\na &= b \\\\\n&= c\n\\end{align}", None, 1),
    ],
)
def test_mathematics_in_a_text(functions: Any, text: str, shown: str | None, formulas: int) -> None:
    script = """async (text) => {
        const box = document.createElement("div");
        (await import("./markdown.js")).renderMarkdown(box, text);
        return [box.textContent, box.querySelectorAll("math").length];
    }"""
    found, count = functions.evaluate(script, text)
    assert count == formulas
    assert shown is None or found.replace("−", "-") == shown


def test_a_streamed_formula_ends_as_the_whole(page: Any, fake: FakeServer) -> None:
    fake.answer, fake.piece = "Then \\(a_1 + b^2\\).\n\n\\[\n\\sum_{i} x_i\n\\]\n\nDone.", 3
    answer = ask(page)
    assert answer.locator("math").count() == 2 and answer.locator("code").count() == 0
    assert page.seen.errors == []
