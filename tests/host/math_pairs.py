"""Answers as models and people write them, by hand: (reference, answer), and whole completions."""

from __future__ import annotations

SAME = [
    # numbers
    ("5", "5.0"), ("5", "+5"), ("-5", "−5"), ("0.5", ".5"), ("1/2", "0.5"), (r"\frac{1}{2}", r"\dfrac12"),
    ("3/4", "6/8"), (r"-\frac{3}{4}", r"\frac{-3}{4}"), (r"-\frac{3}{4}", "-0.75"), ("1000", "1,000"),
    ("1000000", "1,000,000"), ("10000", r"10\,000"), ("11111", r"11,\! 111"), ("1000", r"1{,}000"),
    ("3.2", r"3\frac{1}{5}"), ("0.125", r"\frac18"), ("1024", "2^{10}"), ("0.001", "10^{-3}"), ("120", "5!"),
    ("3", r"\sqrt[3]{27}"), ("7", r"\sqrt{49}"), ("42", "042"), ("12345678901", "12345678901.0"), ("101_2", "101_{2}"),
    (r"\text{101}_2", "101_2"), ("0.333333333333", r"\frac{1}{3}"), ("6.02e23", r"6.02 \times 10^{23}"),
    ("2500", r"2.5 \times 10^3"),
    # roots, constants, functions
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{2}/2", r"\frac1{\sqrt2}"),
    (r"\frac{\pi}{4}", r"0.25\pi"), (r"2\pi", r"\pi + \pi"), (r"\pi", "π"), ("1", r"\tan 45^\circ"),
    (r"\frac12", r"\sin 30^\circ"), (r"\frac{1}{2}", r"\cos(60^\circ)"), ("2", r"\log_2 4"), ("3", r"\log_{10} 1000"),
    ("1", r"\ln e"), ("e^2", r"\mathrm{e}^2"), (r"\sqrt{5}-2", r"\frac{1}{\sqrt{5}+2}"),
    (r"3+2\sqrt{2}", r"(1+\sqrt{2})^2"), (r"\binom{5}{2}", "10"), ("|-3|", "3"),
    # algebra
    ("x^2+2x+1", "(x+1)^2"), ("2x+3", "3+2x"), ("x(x-1)", "x^2-x"), (r"\frac{x+2}{7}", r"\frac17x+\frac27"),
    ("2ab", "2ba"), ("5xy", "5yx"), ("xy", "x y"), ("xy", r"x \cdot y"), ("a^2-b^2", "(a-b)(a+b)"),
    (r"\frac{2x}{2}", "x"), ("x=5", "5"), ("5", "x = 5"), ("y=2x+3", "2x+3"), ("f(x)=x+1", "x+1"), ("x^{2}", "x^2"),
    ("|x-1|", r"\left| x-1 \right|"), (r"\sin^2 x+\cos^2 x", "1"), (r"\sqrt{x^2}", "|x|"), ("x<5", "5>x"),
    (r"x \ge 2", r"x\geq 2"), (r"x \le 3", "x<=3"), ("2x+4y-3=0", r"y=-\frac12 x+\frac34"), ("n+1", "1+n"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"), ("2^{n+1}", r"2\cdot 2^n"),
    # units, percent, money, degrees, text
    ("5", r"5\text{ cm}"), ("5", r"5 \text{ cm}^2"), ("5", r"5\ \mathrm{cm}"), ("10", "10 inches"), ("12", "12 apples"),
    (r"50\%", "50"), ("50%", r"50\%"), ("90", r"90^\circ"), ("90°", r"90^{\circ}"), ("1000", r"\$1,000"),
    ("18.90", r"\$18.9"), ("5 km/h", "5"), (r"\text{Evelyn}", "Evelyn"), ("yes", r"\text{Yes}"), (r"\text{(C)}", "C"),
    ("C", "(C)"), ("C", r"\textbf{C}"), ("5", "5 cm"), ("3", "3 hours"), (r"\text{even}", "even"), ("A", r"\mathrm{A}"),
    ("7", r"7\text{th}"),
    # tuples, intervals, sets, lists, unions
    ("[0,1)", r"\left[0, 1\right)"), ("[0,1]", r"x\in[0,1]"),
    (r"(-\infty,2]\cup[3,\infty)", r"[3,\infty) \cup (-\infty, 2]"), (r"(-\infty,\infty)", r"(-\infty, +\infty)"),
    (r"\{1,2\}", r"\{2, 1\}"), ("3, -3", "-3,3"), (r"\pm 3", "3, -3"), (r"1 \pm \sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}"),
    ("5 or 6 or 7", "7,6,5"), ("5 and 6", "6, 5"), (r"5 \text{ or } 6", "5,6"),
    (r"\left(\frac{1}{2},3\right)", "(0.5, 3)"), ("(1,2),(3,4)", "(3,4), (1,2)"), ("(x,y)=(1,2)", "(1,2)"),
    ("x=1, y=2", "y=2, x=1"), ("x=1, x=2", "1, 2"), (r"\{1,2,3\}", "1,2,3"), ("(0,1]", r"0<x\le 1"),
    ("[2,5]", r"2 \le x \le 5"), (r"\{x \mid x > 2\}", r"(2,\infty)"), (r"\emptyset", r"\varnothing"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}"),
    (r"\begin{pmatrix}0.5\\2\end{pmatrix}", r"\begin{pmatrix}\frac12\\2\end{pmatrix}"), ("1+2i", "2i+1"),
    (r"3\frac12", "3 1/2"), ("3/2", "1 1/2"), ("12:30", "12:30"), ("2:3", "2:3"),
]  # fmt: skip

APART = [
    ("5", "5xy"), ("5xy", "5"), ("2ab", "2cd"), ("12345678901", "12345678902"), ("|x|", "x"), (r"\sqrt{x^2}", "x"),
    ("5", "-5"), ("x", "y"), ("1/3", "0.333"), ("1/3", "0.33"), ("(0,1)", "[0,1]"), ("(0,1)", "[0,1)"),
    ("(1,2)", "(2,1)"), ("1,2", "1,2,3"), (r"\{1\}", r"\{2\}"), ("(1,2)", "1,2"), ("50", "0.5"), ("A", "B"),
    ("3.14", r"\pi"), ("x+1", "x+2"), ("1,1,2", "1,2,2"), ("5", "5 or 6 or 7"), ("5 or 6 or 7", "5"),
    ("101_2", "101_3"), ("101_2", "5"), ("x<5", "x>5"), (r"x \le 5", "x<5"), ("5", "55"), ("2^{10}", "2^{11}"),
    ("5!", "5"), ("x^2", "x^3"), (r"\frac12", r"\frac21"), (r"\sqrt2", "2"), ("1000", "1,0000"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"), ("x=5", "x=6"),
    ("x=1, y=2", "x=2, y=1"), ("1+2i", "1-2i"), (r"\sin x", r"\cos x"), (r"\sin 30", r"\sin 30^\circ"),
    (r"(-\infty,2]\cup[3,\infty)", r"(-\infty,2)\cup[3,\infty)"), ("2", "3"), ("yes", "no"), ("(C)", "(D)"),
    ("0.1", "0.10001"), ("x-y", "y-x"), (r"\log x", "x"), ("a", "ab"), ("12:30", "1:30"), ("2:3", "3:2"),
    (r"\frac{x}{y}", r"\frac{y}{x}"), (r"\{1,2,3\}", r"\{1,2\}"), ("3", r"\pm 3"), ("1.5", "15"), ("0", ""),
    ("9007199254740993", "9007199254740992"), ("100000000000001", "100000000000002"), ("f(x)=x", "x^2"), ("2x", "x^2"),
]  # fmt: skip

SAID = [
    ("5", "The final answer is $5$. I hope it is correct."), ("5", "The answer is: **5**"),
    ("5", "answer is 5 because 2+3=5"), ("5", "So the answer is 5."), ("5", "**Answer:** 5"), ("5", "Answer: $5$"),
    ("1/2", r"The answer is \(\frac{1}{2}\)."), ("1/2", r"Therefore the answer is $$\frac{1}{2}$$"),
    ("5", "The answer is 5, since 5 is prime."), ("12", "The answer is 12 apples."), ("1.5", "The answer is 1.5."),
    ("5", "2 + 3 = 5"), ("5", "We get $x = 5$."), ("72", "She sold 48 and 24, in all **72**."),
    ("5", r"First \boxed{4}, no: \boxed{5}"), ("1,2", r"\boxed{1} and \boxed{2}"),
    ("5", "The final answer is: $\\boxed{5}$"), (r"\frac{3}{4}", "The answer is three quarters: the answer is 3/4"),
    ("5", "<answer>5</answer>"), ("-3", "The answer is −3."), ("2x+1", "The answer is $2x+1$ which is linear."),
    ("1000", "The answer is $1,000."), ("5", r"\fbox{5}"), ("5", r"\boxed 5"),
]  # fmt: skip

UNSAID = [
    ("5", "The answer is 5xy."), ("5", "The answer is not known."), ("5", "I do not know."), ("5", ""),
    ("5", r"5 \boxed{6}"), ("5", "The answer is 5 or 6 or 7."), ("5", r"\boxed{}"),
    ("5", "The answer is 6. A wrong one is 5"), ("5", "5" * 2000), ("1", r"\boxed{9^{9^{9^{9}}}}"), ("1", "(" * 500),
    ("5", r"The answer is \frac{"), ("5", r"\boxed{5"),
]  # fmt: skip
