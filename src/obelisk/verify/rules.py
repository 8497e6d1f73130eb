"""The rules that the prover may use, each with its side conditions, and the laws they stand for.

A rule is data: two patterns and conditions, from which the egglog text is generated, and which a
test evaluates in floats and in the fields. Patterns are S-expressions; lower-case names stand for
formulas, upper-case `A`, `B`, `C` for sets of index digits that a sum or maximum runs over.

Conditions: `(Indep a A)`: no digit of A occurs in a. `(Union A B C)`: C joins the disjoint A and B.
`(Extent A n)`: A runs over n values, whatever other digits are; `(Filled A)`: over at least one.
`(NonNeg a)`: a >= 0 wherever it is defined. `(NonZero a)`: a is not the zero formula. All rules are
identities of real functions wherever both sides are defined.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One identity.

    Attributes:
        name: for reports and tests.
        left, right: patterns.
        when: conditions.
        both: rewrite in either direction (the conditions must then bind under each side).
        tier: 0 always; 1 only after tier 0 did not join the terms (rules that make terms grow).
        finite: needs every operand finite; not used where -inf occurs as a constant.
    """

    name: str
    left: str
    right: str
    when: tuple[str, ...] = ()
    both: bool = False
    tier: int = 0
    finite: bool = False


RULES: tuple[Rule, ...] = (
    Rule("add_comm", "(Add a b)", "(Add b a)"),
    Rule("add_assoc", "(Add (Add a b) c)", "(Add a (Add b c))", both=True),
    Rule("add_zero", "(Add (Num 0) a)", "a"),
    Rule("add_cancel", "(Add a (Mul (Num -1) a))", "(Num 0)", finite=True),
    Rule("add_twice", "(Add a a)", "(Mul (Num 2) a)", tier=1),
    Rule("mul_comm", "(Mul a b)", "(Mul b a)"),
    Rule("mul_assoc", "(Mul (Mul a b) c)", "(Mul a (Mul b c))", both=True),
    Rule("mul_one", "(Mul (Num 1) a)", "a"),
    Rule("mul_cancel", "(Mul a (Inv a))", "(Num 1)", ("(NonZero a)",)),
    Rule("distribute", "(Mul a (Add b c))", "(Add (Mul a b) (Mul a c))", both=True, tier=1),
    Rule("negate_sum", "(Mul (Num -1) (Add b c))", "(Add (Mul (Num -1) b) (Mul (Num -1) c))"),
    Rule("inv_of_product", "(Inv (Mul a b))", "(Mul (Inv a) (Inv b))", both=True),
    Rule("inv_of_inv", "(Inv (Inv a))", "a"),
    Rule("inv_of_exp", "(Inv (Exp a))", "(Exp (Mul (Num -1) a))", both=True),
    Rule("exp_of_sum", "(Exp (Add a b))", "(Mul (Exp a) (Exp b))", both=True),
    Rule("exp_of_zero", "(Exp (Num 0))", "(Num 1)"),
    Rule("inv_of_sqrt", "(Inv (Sqrt a))", "(Sqrt (Inv a))", both=True),
    Rule("sqrt_of_product", "(Sqrt (Mul a b))", "(Mul (Sqrt a) (Sqrt b))", ("(NonNeg a)",)),
    Rule("sqrt_join", "(Mul (Sqrt a) (Sqrt b))", "(Sqrt (Mul a b))", ("(NonNeg a)", "(NonNeg b)")),
    Rule("sqrt_squared", "(Mul (Sqrt a) (Sqrt a))", "a", ("(NonNeg a)",)),
    Rule("sum_of_sum", "(Sum A (Sum B a))", "(Sum C a)", ("(Union A B C)",)),
    Rule("sum_of_scaled", "(Sum A (Mul a b))", "(Mul a (Sum A b))", ("(Indep a A)",), both=True),
    Rule("sum_of_add", "(Sum A (Add a b))", "(Add (Sum A a) (Sum A b))", both=True, tier=1),
    Rule("sum_of_constant", "(Sum A a)", "(Mul (Num n) a)", ("(Indep a A)", "(Extent A n)")),
    Rule("max_comm", "(Max a b)", "(Max b a)"),
    Rule("max_assoc", "(Max (Max a b) c)", "(Max a (Max b c))", both=True),
    Rule("max_idem", "(Max a a)", "a"),
    Rule("rmax_of_rmax", "(RMax A (RMax B a))", "(RMax C a)", ("(Union A B C)",)),
    Rule("rmax_of_constant", "(RMax A a)", "a", ("(Indep a A)", "(Filled A)")),
    Rule("rmax_of_max", "(RMax A (Max a b))", "(Max (RMax A a) (RMax A b))", both=True, tier=1),
    Rule("rmax_of_shifted", "(RMax A (Add a b))", "(Add a (RMax A b))", ("(Indep a A)",),
         both=True, tier=1, finite=True),
    Rule("rmax_of_scaled", "(RMax A (Mul a b))", "(Mul a (RMax A b))",
         ("(Indep a A)", "(NonNeg a)", "(Filled A)"), both=True, tier=1, finite=True),
    Rule("where_of_product", '(Mul z (Fn3 "where" c a b))', '(Fn3 "where" c (Mul z a) (Mul z b))',
         both=True, tier=1),
    Rule("where_of_sum", '(Add z (Fn3 "where" c a b))', '(Fn3 "where" c (Add z a) (Add z b))',
         both=True, tier=1),
    Rule("add_of_max", "(Add a (Max b c))", "(Max (Add a b) (Add a c))", tier=1, finite=True),
)  # fmt: skip

# Rules about numbers, written out because they compute.
ZERO, UNIT = "(bigrat (bigint 0) (bigint 1))", "(bigrat (bigint 1) (bigint 1))"
NUMBERS = (
    "(rewrite (Add (Num x) (Num y)) (Num (+ x y)))",
    "(rewrite (Mul (Num x) (Num y)) (Num (* x y)))",
    f"(rewrite (Inv (Num x)) (Num (/ {UNIT} x)) :when ((!= x {ZERO})))",
)

# How facts about formulas follow from facts about their parts.
FACTS = (
    f"(rule ((= t (Num x)) (>= x {ZERO})) ((NonNeg t)))",
    f"(rule ((= t (Num x)) (!= x {ZERO})) ((NonZero t)))",
    "(rule ((= t (Add a b)) (Indep a S) (Indep b S)) ((Indep t S)))",
    "(rule ((= t (Mul a b)) (Indep a S) (Indep b S)) ((Indep t S)))",
    "(rule ((= t (Max a b)) (Indep a S) (Indep b S)) ((Indep t S)))",
    "(rule ((= t (Inv a)) (Indep a S)) ((Indep t S)))",
    "(rule ((= t (Fn3 f a b c)) (Indep a S) (Indep b S) (Indep c S)) ((Indep t S)))",
    "(rule ((= t (Exp a)) (Indep a S)) ((Indep t S)))",
    "(rule ((= t (Sqrt a)) (Indep a S)) ((Indep t S)))",
    "(rule ((= t (Num x)) (Digits S)) ((Indep t S)))",
    "(rule ((= t (Sum A a)) (Indep a S) (Steady A S)) ((Indep t S)))",
    "(rule ((= t (RMax A a)) (Indep a S) (Steady A S)) ((Indep t S)))",
    "(rule ((= t (Sum A a)) (Without S A R) (Indep a R) (Steady A S)) ((Indep t S)))",
    "(rule ((= t (RMax A a)) (Without S A R) (Indep a R) (Steady A S)) ((Indep t S)))",
    "(rule ((= t (Sum A a)) (Inside S A)) ((Indep t S)))",
    "(rule ((= t (RMax A a)) (Inside S A)) ((Indep t S)))",
    "(rule ((= t (Mul a a))) ((NonNeg t)))",
    "(rule ((= t (Exp a))) ((NonNeg t) (NonZero t)))",
    "(rule ((= t (Sqrt a))) ((NonNeg t)))",
    "(rule ((= t (Mul a b)) (NonNeg a) (NonNeg b)) ((NonNeg t)))",
    "(rule ((= t (Add a b)) (NonNeg a) (NonNeg b)) ((NonNeg t)))",
    "(rule ((= t (Inv a)) (NonNeg a)) ((NonNeg t)))",
    "(rule ((= t (Sum A a)) (NonNeg a)) ((NonNeg t)))",
    "(rule ((= t (RMax A a)) (NonNeg a)) ((NonNeg t)))",
    "(rule ((Extent S n)) ((Filled S)))",
    "(rule ((= t (Mul a b)) (NonZero a) (NonZero b)) ((NonZero t)))",
    "(rule ((= t (Inv a)) (NonZero a)) ((NonZero t)))",
)

SORTS = """
(sort E)
(constructor Num (BigRat) E)
(constructor Leaf (String) E)
(constructor Add (E E) E)
(constructor Mul (E E) E)
(constructor Max (E E) E)
(constructor Inv (E) E)
(constructor Exp (E) E)
(constructor Sqrt (E) E)
(constructor Sum (String E) E)
(constructor RMax (String E) E)
(constructor Prefix (String E) E)
(constructor Fn1 (String E) E)
(constructor Fn2 (String E E) E)
(constructor Fn3 (String E E E) E)
(relation Indep (E String))
(relation NonNeg (E))
(relation NonZero (E))
(relation Union (String String String))
(relation Without (String String String))
(relation Inside (String String))
(relation Extent (String BigRat))
(relation Filled (String))
(relation Steady (String String))
(relation Digits (String))
(relation Goal (i64 E E))
"""

# The operator table's laws, and where each is used: a rule above, or the translation to terms.
AXIOMS: dict[str, tuple[str, ...]] = {
    "commutative": ("add_comm", "mul_comm", "max_comm"),
    "associative": ("add_assoc", "mul_assoc", "max_assoc", "sum_of_sum", "sum_of_scaled"),
    "idempotent": ("max_idem",),
    "distributes_over_add": ("distribute",),
    "sub_is_add_neg": ("translation",),
    "neg_moves": ("negate_sum", "mul_assoc"),
    "div_moves": ("inv_of_product", "inv_of_inv", "mul_cancel"),
    "exp_of_sum": ("exp_of_sum", "exp_of_zero", "inv_of_exp"),
    "sqrt_of_product": ("sqrt_of_product", "sqrt_join", "sqrt_squared"),
    "rsqrt_is_inverse_sqrt": ("translation", "inv_of_sqrt"),
    "square_is_mul": ("translation",),
    "linear": ("sum_of_add", "sum_of_scaled", "sum_of_constant"),
    "bilinear": ("distribute", "sum_of_add", "sum_of_scaled"),
    "sum_splits": ("translation", "sum_of_sum"),
    "max_splits": ("translation", "rmax_of_rmax"),
    "shift_invariance": ("exp_of_sum", "add_cancel", "sum_of_scaled"),
    "partition": ("translation",),
    "involutive": ("translation",),
    "elementwise_transparent": ("translation",),
    "concat_matmul": ("translation",),
}


def _numbers(pattern: str) -> str:
    """Numbers in patterns as egglog's exact rationals."""
    for n in ("-1", "0", "1", "2"):
        pattern = pattern.replace(f"(Num {n})", f"(Num (bigrat (bigint {n}) (bigint 1)))")
    return pattern


def _rewrite(rule: Rule, left: str, right: str, ruleset: str) -> str:
    when = f" :when ({' '.join(rule.when)})" if rule.when else ""
    return f"(rewrite {_numbers(left)} {_numbers(right)}{when} :ruleset {ruleset})"


def program_text(finite: bool, clipped: bool) -> str:
    """The egglog program: sorts, facts and rules. `finite` False leaves out rules that need finite
    operands; `clipped` False, where no tile is short, leaves out the conditions on ranges.
    """
    lines = [SORTS, "(ruleset base)", "(ruleset grow)", "(ruleset facts)"]
    lines += [f"{line[:-1]} :ruleset base)" for line in NUMBERS]
    facts = FACTS if clipped else tuple(f.replace(" (Steady A S)", "") for f in FACTS)
    lines += [f"{line[:-1]} :ruleset facts)" for line in facts]
    for rule in RULES:
        if rule.finite and not finite:
            continue
        ruleset = "grow" if rule.tier else "base"
        lines.append(_rewrite(rule, rule.left, rule.right, ruleset))
        if rule.both:
            lines.append(_rewrite(rule, rule.right, rule.left, ruleset))
    return "\n".join(lines)
