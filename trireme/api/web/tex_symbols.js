// Tables of TeX's names for mathematics and the characters for them.

const table = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => [pair.slice(0, pair.indexOf(":")), pair.slice(pair.indexOf(":") + 1)]));

// Letters, which are set in italics.
export const LETTERS = table(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ omicron:ο
  pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω
  Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω
  infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ emptyset:∅ varnothing:∅ imath:ı jmath:ȷ wp:℘ top:⊤ bot:⊥ angle:∠ degree:°
  dots:… ldots:… cdots:⋯ vdots:⋮ ddots:⋱ prime:′ square:□ triangle:△ checkmark:✓ complement:∁ beth:ℶ eth:ð
`);

// Operators and relations, with MathML's spacing.
export const OPERATORS = table(`
  times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ oslash:⊘ odot:⊙ wedge:∧ land:∧ vee:∨ lor:∨ cap:∩ cup:∪
  setminus:∖ sqcap:⊓ sqcup:⊔ uplus:⊎ amalg:⨿ dagger:† ddagger:‡ neg:¬ lnot:¬ forall:∀ exists:∃ nexists:∄ therefore:∴ because:∵
  leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠ ll:≪ gg:≫ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ asymp:≍ doteq:≐ triangleq:≜ coloneqq:≔ leqslant:⩽ geqslant:⩾
  in:∈ notin:∉ ni:∋ subset:⊂ supset:⊃ subseteq:⊆ supseteq:⊇ subsetneq:⊊ mid:∣ nmid:∤ parallel:∥ perp:⊥ vdash:⊢ models:⊨ prec:≺ succ:≻ preceq:⪯ succeq:⪰
  to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔ implies:⟹ impliedby:⟸ iff:⟺ mapsto:↦ longrightarrow:⟶
  longleftarrow:⟵ longmapsto:⟼ uparrow:↑ downarrow:↓ updownarrow:↕ hookrightarrow:↪ rightharpoonup:⇀ rightleftharpoons:⇌ nearrow:↗ searrow:↘ colon::
  lt:< gt:> vert:| Vert:‖ backslash:\\
`);

// Large operators. In a display their limits are above and below.
export const LARGE = table(`
  sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀ bigsqcup:⨆ bigodot:⨀
`);
export const INTEGRALS = table("int:∫ iint:∬ iiint:∭ oint:∮");

export const FENCES = table(`
  lbrace:{ rbrace:} lbrack:[ rbrack:] langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lvert:| rvert:| lVert:‖ rVert:‖ vert:| Vert:‖ backslash:\\
  uparrow:↑ downarrow:↓ lparen:( rparen:)
`);

export const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker hom deg arg gcd Pr lim liminf limsup max min sup inf argmax argmin".split(" "),
);
export const LIMITS = new Set("lim liminf limsup max min sup inf argmax argmin det gcd Pr".split(" "));

export const ACCENTS = table("hat:^ widehat:^ bar:¯ overline:¯ vec:→ overrightarrow:→ dot:˙ ddot:¨ tilde:~ widetilde:~ check:ˇ breve:˘ acute:´ grave:` mathring:˚");
export const UNDER = table("underline:_ underbrace:⏟");
export const OVER = table("overbrace:⏞");

export const SPACES = { ",": 0.167, ":": 0.222, ">": 0.222, ";": 0.278, " ": 0.25, "!": -0.167, quad: 1, qquad: 2, enspace: 0.5, thinspace: 0.167 };

// The brackets and the style of \begin{...} ... \end{...} environments.
export const ENVIRONMENTS = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], smallmatrix: ["", ""],
  cases: ["{", "", "cases"], array: ["", "", "array"], aligned: ["", "", "aligned"], align: ["", "", "aligned"], "align*": ["", "", "aligned"],
  split: ["", "", "aligned"], gathered: ["", ""], gather: ["", ""], "gather*": ["", ""], equation: ["", ""], "equation*": ["", ""], eqnarray: ["", "", "aligned"],
  "eqnarray*": ["", "", "aligned"], multline: ["", ""], "multline*": ["", ""],
};

// Mathematical alphabets: [first of A-Z, first of a-z, first of 0-9], with the letters whose code points are elsewhere.
export const ALPHABETS = {
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathcal: [0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  mathfrak: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2, {}],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6, {}],
};
ALPHABETS.mathscr = ALPHABETS.mathcal;
ALPHABETS.boldsymbol = ALPHABETS.bm = ALPHABETS.mathbf;
