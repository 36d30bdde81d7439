"""When two answers are the same: cases by hand for `math`, `numeric` and `choice`, and the golds of
a published set."""

import itertools
import json
import time
from pathlib import Path

import pytest

from tasks.grading import units
from tasks.grading.verifiers import choice, math, numeric

FRAC, DFRAC = r"\frac", r"\dfrac"


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        (r"\boxed{0}", "5-5c", "wrong"),
        (r"\boxed{x+5}", "x+5m", "wrong"),
        (r"\boxed{2}", "2s", "wrong"),
        (r"\boxed{2s}", "2s", "correct"),
        (r"\boxed{5 m}", "5 cm", "wrong"),
        (r"\boxed{5}", "5 cm", "correct"),
        (r"\boxed{5\text{ cm}}", "5", "correct"),
        (r"\boxed{1 m}", "100 cm", "correct"),
        (r"\boxed{3e6}", "3000000", "correct"),
        (r"\boxed{3\times10^6}", "3e6", "correct"),
        (r"\boxed{1.6\times10^{-19}}", r"1.7\times10^{-19}", "wrong"),
        ("0.0000002", "0.0000001", "wrong"),
        (r"\boxed{1.6\times10^{-19}}", "1.6e-19", "correct"),
        (r"\boxed{seat}", "east", "wrong"),
        (r"\boxed{no}", "on", "wrong"),
        (r"\boxed{ABCD}", "ADCB", "wrong"),
        (r"\boxed{\text{no}}", "No", "correct"),
        (r"\boxed{33_4}", "33_5", "wrong"),
        (r"\boxed{33_{5}}", "33_5", "correct"),
        (r"\boxed{33}", "33_5", "correct"),
        (r"\boxed{18}", "33_5", "wrong"),
        (r"\boxed{1}", r"\{x | -2 <= x < 1\}", "wrong"),
        (r"\boxed{[-2,1)}", "{x | -2 <= x < 1}", "correct"),
        (r"\boxed{(-2,1)}", "{x | -2 <= x < 1}", "wrong"),
        (r"\boxed{\{x \mid -2 \leq x < 1\}}", "[-2,1)", "correct"),
        (r"\boxed{-2\le x<1}", "[-2,1)", "correct"),
        (r"\boxed{4}", "xy=4", "wrong"),
        (r"\boxed{xy=4}", "4", "wrong"),
        (r"\boxed{x=4}", "4", "correct"),
        (r"\boxed{4}", "x=4", "correct"),
        (r"\boxed{y=4}", "x=4", "wrong"),
        (r"\boxed{5 \text{ or } 6}", "5", "wrong"),
        ("The answer is 5 or 6", "6", "wrong"),
        ("The answer is 5 or 6", "5", "wrong"),
        ("The answer is 5 or 6", "5, 6", "correct"),
        (r"\boxed{42.}", "42", "correct"),
        (r"\boxed{42,}", "42", "correct"),
        (r"\boxed {7}", "7", "correct"),
        (r"\boxed{\boxed{8}}", "8", "correct"),
        (r"\boxed{45°}", "45", "correct"),
        (r"\boxed{45}", r"45^\circ", "correct"),
        (r"\boxed{10^-2}", "0.01", "correct"),
        (r"\boxed{71.\overline{3}}", r"\frac{214}{3}", "correct"),
        (r"\boxed{b > a > c}", "c < a < b", "correct"),
        (r"\boxed{b>a>c}", "b > a > c", "correct"),
        (r"\boxed{a>b>c}", "b > a > c", "wrong"),
        (r"\boxed{\emptyset}", r"\varnothing", "correct"),
        (r"\boxed{\text{all real numbers}}", r"\mathbb{R}", "correct"),
        (r"\boxed{\text{no solution}}", r"\emptyset", "correct"),
        (r"\boxed{pi}", r"\pi", "correct"),
        (r"\boxed{2\pi}", "2pi", "correct"),
        ("所以答案是 5 厘米。", "5", "correct"),
        (r"答案：$\frac{1}{2}$", "0.5", "correct"),
        ("所以，小明有12个苹果。", "12", "correct"),
        (r"\boxed{2,1}", '{"all": ["1","2"]}', "correct"),
        (r"\boxed{1}", '{"all": ["1","2"]}', "wrong"),
        (r"\boxed{1}", '{"any": ["1","2"]}', "correct"),
        (r"\boxed{3.15}", '{"answer":"3.14","tolerance":0.02}', "correct"),
        (r"\boxed{\frac{2}{4}}", "0.5", "correct"),
        ("x^2+1", "1+x^2", "correct"),
        ("2x + 3", "2x+4", "wrong"),
        (r"\boxed{28\%}", r"28\%", "correct"),
        (r"\boxed{0.28}", r"28\%", "correct"),
        (r"\boxed{\frac{1}{20000}}", r"\dfrac{1}{20,\!000}.", "correct"),
        ("Evelyn", r"\text{Evelyn}", "correct"),
        ("no mathematics", "7", "unparsed"),
        ("7", "forty two", "error"),
        (r"\boxed{1.414}", r"\sqrt{2}", "wrong"),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt2}", "correct"),
        (r"\boxed{(1,2)}", "(2,1)", "wrong"),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", "correct"),
        (r"\boxed{1 \pm \sqrt{5}}", r"1+\sqrt5, 1-\sqrt5", "correct"),
        (r"\boxed{9 \text{ apples}}", "9", "correct"),
        (r"\boxed{9 apples}", "9", "correct"),
        (r"\boxed{3 \text{ million}}", "3", "wrong"),
        (r"\boxed{10,000}", "10000", "correct"),
        (r"\boxed{\$5}", "5", "correct"),
        (r"\boxed{A}", "A", "correct"),
        (r"\boxed{\text{(A)}}", "A", "correct"),
        (r"\boxed{f(x)=x+1}", "x+1", "correct"),
        (r"\boxed{AB=4}", "4", "correct"),
        (r"\boxed{x \in [-2,7]}", "[-2,7]", "correct"),
        (r"\boxed{x\geq 3}", r"[3,\infty)", "correct"),
        (r"\boxed{x > 3}", "x>3", "correct"),
        (r"so x is $\frac{3}{4}$.", "0.75", "correct"),
        (
            r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
            "correct",
        ),
        (r"\boxed{yx}", "xy", "correct"),
        (r"\boxed{-1, 2}", "2,-1", "correct"),
        (r"\boxed{7:30}", "7:30", "correct"),
        (r"\boxed{3:2}", "3:2", "correct"),
        (r"\boxed{2^{10}}", "1024", "correct"),
        (r"\boxed{5!}", "120", "correct"),
        (r"\boxed{1/3}", "0.333333", "wrong"),
        (r"\boxed{\text{Monday}}", "monday", "correct"),
        (r"\boxed{12 \text{ hours}}", "720 minutes", "correct"),
        (r"The final answer is $\boxed{C}$", "C", "correct"),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"(3,\pi/2)", "correct"),
        (r"<answer>\boxed{5}</answer>", "5", "correct"),
        ("#### 18", "18", "correct"),
        (r"\boxed{AC}", "CA", "wrong"),
        (r"\boxed{none}", "0", "wrong"),
        (r"\boxed{x=1 \text{ or } x=2}", "1,2", "correct"),
        (r"\boxed{0.5x+1}", r"\frac{x}{2}+1", "correct"),
        (r"\boxed{12\text{ cm}^2}", r"12\text{ cm}^3", "wrong"),
        (r"\boxed{2.5\%}", "0.025", "correct"),
        (r"\boxed{7\text{ pm}}", "7 pm", "correct"),
        (r"\boxed{7 am}", "7 pm", "wrong"),
        (r"\boxed{x^2+y^2=4}", "x^2+y^2=4", "correct"),
        (r"\boxed{2x^2+2y^2=8}", "x^2+y^2=4", "correct"),
        (r"\boxed{\text{Even}}", r"\text{Odd}", "wrong"),
        (r"\boxed{1,2}", "12", "wrong"),
        (r"\boxed{1000}", "1,000", "correct"),
        (r"\boxed{\$0.50}", "50 cents", "correct"),
        (r"\boxed{\$5}", "5 euros", "wrong"),
        (r"\boxed{7B}", "B7", "wrong"),
        (r"\boxed{x2}", "2x", "wrong"),
        (r"\boxed{1}", r"\{n \in \mathbb{Z} \mid -2 \le n < 1\}", "wrong"),
        (r"\boxed{\{n \in \mathbb{Z} : n > 0\}}", r"\{n \in \mathbb{Z} : n > 0\}", "correct"),
        (r"\boxed{\text{not }5}", "5", "wrong"),
        (r"\boxed{\text{The answer is } 42}", "42", "correct"),
        (r"\boxed{50\ \%}", "0.5", "correct"),
        (r"\boxed{(2, inf)}", r"(2,\infty)", "correct"),
        ("The answer is $5$ or $6$.", "5", "wrong"),
        ("The answer is $5$ or $6$.", "6", "wrong"),
        (r"$\boxed{5}$ or $\boxed{6}$", "5", "wrong"),
        (r"\boxed{5 \text{ and } 6}", "5", "wrong"),
        (r"\boxed{\text{either } 5 \text{ or } 6}", "6", "wrong"),
        ("答えは12です。", "12", "correct"),
        ("정답은 12입니다", "12", "correct"),
        ("Ответ: 5", "5", "correct"),
        ("答案为 3 或 4", "3", "wrong"),
        (r"\boxed{x=4}", "y=4", "wrong"),
        (r"\boxed{12cm}", "12m", "wrong"),
        (r"\boxed{3c}", "3", "wrong"),
        (r"\boxed{10h}", "10", "wrong"),
        (r"\boxed{7g}", "7", "wrong"),
        (r"\boxed{2t}", "2", "wrong"),
        (r"\boxed{5}", "5l", "wrong"),
        (r"\boxed{10cm}", "10", "correct"),
        (r"\boxed{5o}", "5", "wrong"),
        (r"\boxed{3th}", "3", "wrong"),
        (r"\boxed{3am}", "3", "wrong"),
        (r"\boxed{ABC}", "ACB", "wrong"),
        (r"\boxed{stop}", "pots", "wrong"),
        (r"\boxed{\text{listen}}", r"\text{silent}", "wrong"),
        (r"\boxed{100_2}", "100_3", "wrong"),
        (r"\boxed{0.1}", "0.10", "correct"),
        (r"\boxed{1e-7}", "2e-7", "wrong"),
        (r"\boxed{(0.0000001, 2)}", "(0.0000002, 2)", "wrong"),
        (r"\boxed{6.02 \times 10^{23}}", "602000000000000000000000", "correct"),
        (r"\boxed{x+y=4}", "4", "wrong"),
        (r"\boxed{4}", "x+y=4", "wrong"),
        (r"\boxed{x^2=4}", "4", "wrong"),
        (r"\boxed{2x=4}", "4", "wrong"),
        (r"\boxed{4}", "2x=4", "wrong"),
        (r"\boxed{f(2)=4}", "4", "correct"),
        (r"\boxed{\angle ABC = 30^\circ}", "30", "correct"),
        (r"\boxed{n=7}", "7", "correct"),
        (r"\boxed{x_1=2}", "2", "correct"),
        (r"\boxed{x \in (-\infty, 2) \cup (3, \infty)}", r"(-\infty,2)\cup(3,\infty)", "correct"),
        (r"\boxed{x<2 \text{ or } x>3}", r"(-\infty,2)\cup(3,\infty)", "correct"),
        (r"\boxed{-3, 1}", r"x=-3 \text{ or } x=1", "correct"),
        (r"\boxed{x=-3}", r"x=-3 \text{ or } x=1", "wrong"),
        (r"\boxed{1,2,3}", r"\{1,2,3\}", "correct"),
        (r"\boxed{1,2}", r"\{1,2,3\}", "wrong"),
        (r"\boxed{\text{Yes}}", "no", "wrong"),
        (r"\boxed{\text{yes}}", "Yes", "correct"),
        (r"\boxed{\varnothing}", r"\{\}", "correct"),
        (r"\boxed{0}", r"\emptyset", "wrong"),
        (r"\boxed{\mathbb{R}}", "all real numbers", "correct"),
        (r"\boxed{(-\infty, \infty)}", "all real numbers", "correct"),
        (r"\boxed{x \in \mathbb{R}}", r"\mathbb{R}", "correct"),
        (r"\boxed{\frac{71}{100}}", "0.71", "correct"),
        (r"\boxed{0.\overline{3}}", r"\frac13", "correct"),
        (r"\boxed{0.333}", r"\frac13", "wrong"),
        (r"\boxed{3\frac{1}{2}}", "3.5", "correct"),
        (r"\boxed{\text{The answer is 5 apples}}", "5", "correct"),
        ("**Answer: 42**", "42", "correct"),
        ("Answer: 42.", "42", "correct"),
        (r"\[\boxed{42}\]", "42", "correct"),
        (r"\boxed{{42}}", "42", "correct"),
        (r"\boxed{ 42 }$", "42", "correct"),
        ("\\boxed\n{42}", "42", "correct"),
        (r"\boxed{2\sqrt3}", r"\sqrt{12}", "correct"),
        (r"\boxed{\sqrt(12)}", r"2\sqrt3", "correct"),
        ("sqrt(12)", r"2\sqrt3", "correct"),
        ("pi/4", r"\frac{\pi}{4}", "correct"),
        ("2*x+1", "2x+1", "correct"),
        ("x**2", "x^2", "correct"),
        (r"\boxed{\text{B}}", "B", "correct"),
        (r"\boxed{3/4 \text{ of a cup}}", "3/4", "correct"),
        (r"\boxed{45^{\circ}}", "45 degrees", "correct"),
        (r"\boxed{1267650600228229401496703205377}", "2^{100}", "wrong"),
        (r"\boxed{10^{100}+1}", "10^{100}", "wrong"),
        (r"\boxed{3.141592653589793238}", r"\pi", "wrong"),
        (r"\boxed{1.4142135623730950488}", r"\sqrt2", "wrong"),
        (r"\boxed{\{2\cdot10^{-20},1\}}", r"\{10^{-20},1\}", "wrong"),
        (r"\boxed{((2\cdot10^{-20},1),2)}", "((10^{-20},1),2)", "wrong"),
        (r"\boxed{[2\cdot10^{-20},1]}", "[10^{-20},1]", "wrong"),
        (
            r"\boxed{\begin{pmatrix}0.00000000000002\\1\end{pmatrix}}",
            r"\begin{pmatrix}10^{-14}\\1\end{pmatrix}",
            "wrong",
        ),
        (r"\boxed{1 2}", "12", "wrong"),
        (r"\boxed{10 000}", "10,000", "correct"),
        (r"\boxed{10\,000}", "10000", "correct"),
        (r"\boxed{1.6*10**-19}", "1.6e-19", "correct"),
        (r"\boxed{1.6\times 10^{ - 19}}", "1.6e-19", "correct"),
        (r"\boxed{½}", "0.5", "correct"),
        (r"\boxed{2½}", r"\frac52", "correct"),
        (r"\boxed{x²-1}", "x^2-1", "correct"),
        (r"\boxed{100 m²}", r"100\text{ m}^2", "correct"),
        (r"\boxed{5 m}", r"5\text{ m}^2", "wrong"),
        (r"\boxed{5\frac{\text{m}}{\text{s}}}", r"5\text{ m/s}", "correct"),
        (r"\boxed{5\frac{\text{m}}{\text{s}}}", r"5\text{ km/h}", "wrong"),
        (r"\boxed{\frac{\pi}{3}\text{ rad}}", r"60^\circ", "correct"),
        (r"\boxed{\sin 45^\circ}", r"\frac{\sqrt2}{2}", "correct"),
        (r"\boxed{\sin 45}", r"\sin 45^\circ", "wrong"),
        (r"\boxed{33_{(5)}}", "33_5", "correct"),
        (r"\boxed{33_{(6)}}", "33_5", "wrong"),
        (r"\boxed{]0,1[}", "(0,1)", "correct"),
        (r"\boxed{]0,1]}", "(0,1)", "wrong"),
        (r"\boxed{[0;1]}", "[0,1]", "correct"),
        (r"\boxed{(-oo,2)}", r"(-\infty,2)", "correct"),
        (r"\boxed{\lbrace 2,1\rbrace}", r"\{1,2\}", "correct"),
        (r"\boxed{x=1, y=2}", "(1,2)", "correct"),
        (r"\boxed{y=2, x=1}", "(1,2)", "correct"),
        (r"\boxed{x=2, y=1}", "(1,2)", "wrong"),
        (r"\boxed{\color{red}{42}}", "42", "correct"),
        (r"\boxed{\underline{42}}", "42", "correct"),
        (r"\boxed{71.\overline3}", r"\frac{214}{3}", "correct"),
        (r"\boxed{\text{There is no solution}}", r"\emptyset", "correct"),
        (r"\boxed{\text{the empty set}}", r"\varnothing", "correct"),
        (r"\boxed{x\in\emptyset}", r"\emptyset", "correct"),
        (r"\boxed{\mathbf{R}}", "all real numbers", "correct"),
        (r"\boxed{\{x: x\in\mathbb{R}\}}", r"\mathbb{R}", "correct"),
        (r"\boxed{-\infty<x<\infty}", r"\mathbb{R}", "correct"),
        (r"\boxed{2\text{ or }-2}", r"\pm 2", "correct"),
        (r"\boxed{2,2}", r"\pm 2", "wrong"),
        (r"\boxed{2+\sqrt3, 2-\sqrt3}", r'{"all": ["2 \\pm \\sqrt{3}"]}', "correct"),
        (r"\boxed{1/2 x + 3}", r"\frac{x}{2} + 3", "correct"),
        (r"\boxed{3/2 \pi}", r"\frac{3\pi}{2}", "correct"),
        (r"\boxed{1/(2x)}", r"\frac{x}{2}", "wrong"),
        ("The answer is east.", "east", "correct"),
        ("The answer is not east.", "east", "wrong"),
        ("La respuesta es 5 o 6", "6", "wrong"),
        ("Die Antwort ist 5 oder 6", "6", "wrong"),
        ("Ответ: 5 или 6", "6", "wrong"),
        ("答案是5或者6", "6", "wrong"),
        ("答えは5または6です", "6", "wrong"),
        (r"\boxed{\frac{1}{abc + def + 1}}", "1", "wrong"),
        (r"\boxed{abc + def + 1}", "1", "wrong"),
        (r"\boxed{\frac{1}{abc+def+1}}", r"\frac{1}{1 + def + abc}", "correct"),
        (r"\boxed{\frac{1}{LCs^2 + RCs + 1}}", r"\frac{1}{LCs^2 + RCs + 1}", "correct"),
        (r"\boxed{Total cost = 5}", "5", "correct"),
        (r"\boxed{2}", r"$\boxed{1}$ and $\boxed{2}$", "wrong"),
        (r"\boxed{2, 1}", r"$\boxed{1}$ and $\boxed{2}$", "correct"),
        (r"\boxed{2}", r"$x = \boxed{1}$ or $x = \boxed{2}$", "wrong"),
        (r"\boxed{x=1, x=2}", r"$x = \boxed{1}$ or $x = \boxed{2}$", "correct"),
        (r"\boxed{2}", r"From \boxed{1} follows \boxed{2}.", "correct"),
    ],
)
def test_math(completion: str, gold: str, outcome: str) -> None:
    assert math.verify(completion, gold).outcome == outcome


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        ("5 m", "5 cm", "wrong"),
        ("It is 5 cm.", "5 cm", "correct"),
        ("It is 5", "5 cm", "correct"),
        ("#### 5 cm", "5", "correct"),
        (r"2.1\times 10^{-8}", "2.1e-8", "correct"),
        ("-8", r"2.1\times 10^{-8}", "wrong"),
        ("3e6", "3000000", "correct"),
        ("0.0000002", "0.0000001", "wrong"),
        ("The answer is 5 or 6", "6", "wrong"),
        ("5 or 5", "5", "correct"),
        ("0", "5-5c", "error"),
        ("5", "x+5m", "error"),
        ("2", "2s", "error"),
        ("5 minutes and 3 seconds", "3", "correct"),
        (r"\boxed{42.}", "42", "correct"),
        ("45°", "45", "correct"),
        (r"71.\overline{3}", "214/3", "correct"),
        (r"1.6\times10^{-19}", r"1.7\times10^{-19}", "wrong"),
        ("3.15", '{"answer":"3.14","relative_tolerance":0.01}', "correct"),
        ("答案是12个", "12", "correct"),
        ("she has 9 apples (not 8 pears)", "9 (apples)", "wrong"),
        ("1 and 2", '{"all":["2","1"]}', "correct"),
        ("so #### 18\nthat is 9*2", "18", "correct"),
        ("100 cm", "1 m", "correct"),
        ("7 m", "7 minutes", "wrong"),
        ("$5", "5 dollars", "correct"),
        ("500 cents", "5 dollars", "correct"),
        ("It costs $18 per day", "18", "correct"),
        ("60 miles per hour", "60 mph", "correct"),
        ("12pm", "12", "correct"),
        ("10th", "10", "correct"),
        ("5 in total", "5", "correct"),
        ("42x", "42", "wrong"),
        ("42k", "42", "wrong"),
        ("42^2", "42", "wrong"),
        (r"\sqrt{42}", "42", "wrong"),
        ("0,42", "42", "wrong"),
        ("5 oder 42", "42", "wrong"),
        ("5 cm²", "5 cm", "wrong"),
        ("½", "1/2", "correct"),
        ("–3", "-3", "correct"),
        ("1*10**-7", "1e-7", "correct"),
        (r"\boxed{5, 1, -3}", '{"all":["1","-3"]}', "wrong"),
        ("of the 5, x is 1 or -3", '{"all":["1","-3"]}', "correct"),
        (r"\boxed{41, 42}", "42", "wrong"),
        (r"\boxed{42, 42}", "42", "correct"),
        (r"\boxed{\{41, 42\}}", "42", "wrong"),
        (r"\boxed{[41;42]}", "42", "wrong"),
        (r"\boxed{41 \text{ and } 42}", "42", "wrong"),
        (r"\boxed{41} \text{ or } \boxed{42}", "42", "wrong"),
        (r"\boxed{6 \times 7}", "7", "wrong"),
        (r"\boxed{6 \times 7 = 42}", "42", "correct"),
        (r"\boxed{x = 42}", "42", "correct"),
        (r"\boxed{x \le 42}", "42", "wrong"),
        (r"\boxed{41=42}", "42", "wrong"),
        (r"\boxed{42.0=42}", "42", "correct"),
        (r"\boxed{\text{Not } 42}", "42", "wrong"),
        (r"\boxed{2\frac{1}{2}}", "2.5", "correct"),
        ("<answer>41, 42</answer>", "42", "wrong"),
        ("<answer>42</answer>", "42", "correct"),
        ("#### 41, 42", "41", "wrong"),
        ("41, 42", "42", "wrong"),
        ("41-42", "42", "wrong"),
        ("It is 41–42.", "42", "wrong"),
        ("x<42", "42", "wrong"),
        ("42 > x", "42", "wrong"),
        ("41=42", "42", "wrong"),
        ("6*7 = 42", "42", "correct"),
        ("She has $50 - $8 = $42 left.", "42", "correct"),
        ("so <<6*7=42>>42", "42", "correct"),
        ("=> 42", "42", "correct"),
        ("Not 42", "42", "wrong"),
        ("It isn't equal to 42.", "42", "wrong"),
        ("It is not 41 but 42.", "42", "correct"),
        ("From 10 to 42 it takes 200 < 220 s, so 42", "42", "correct"),
        ("42", "41, 42", "error"),
        ("42", r"\boxed{41} and \boxed{42}", "error"),
        ("42", "40-42", "error"),
        ("42", "x < 42", "error"),
    ],
)
def test_numeric(completion: str, gold: str, outcome: str) -> None:
    assert numeric.verify(completion, gold).outcome == outcome


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        ("AC", "CA", "correct"),
        ("A, C", "AC", "correct"),
        (r"\boxed{A, C}", "AC", "correct"),
        ("The answer is A and C.", "AC", "correct"),
        ("The answers are A, C", "A,C", "correct"),
        ("A", "AC", "wrong"),
        ("AC", "A", "wrong"),
        ("答案是AC", "AC", "correct"),
        ("答案: C", "C", "correct"),
        ("The answer is B.", "B", "correct"),
        ("The answer is B", "B or C", "error"),
        ("BAD", "BAD", "correct"),
        (r"\boxed{\text{B and D}}", "BD", "correct"),
        ("The answer is D because AB is long", "D", "correct"),
        ("Answer: (B)", "B", "correct"),
        ("A. Because B is not valid", "A", "correct"),
        ("The answer is A or B", "A", "wrong"),
        ("The answer is either A or B", "B", "wrong"),
        ("The answer is not A", "A", "unparsed"),
        ("The answer is not A. B is the answer.", "B", "correct"),
        ("A is the correct choice because option B is wrong", "A", "correct"),
        ("The answer is C. Option A is close.", "C", "correct"),
        ("Answer A is tempting, but option C is correct.", "C", "correct"),
        ("The answer is C. Option A is not correct.", "C", "correct"),
        ("Consider option A first. Then option B.", "B", "correct"),
        ("A is not the answer; the answer is C", "C", "correct"),
        ("Options A and C are both correct.", "AC", "correct"),
        ("Options A and C are wrong. The answer is B.", "B", "correct"),
        ("Options A and C are wrong. The answer is B.", "AC", "wrong"),
        (r"\boxed{ac}", "A, C", "correct"),
        ("a and c", "AC", "correct"),
        ("It is B, not A", "A", "wrong"),
        ("It is B, not A", "B", "correct"),
        ("The answer is a", "A", "correct"),
        ("故选A", "A", "correct"),
        ("答案是A、C", "AC", "correct"),
        ("<answer>A, C</answer>", "AC", "correct"),
        ("The correct answers are (A) and (C).", "AC", "correct"),
        (r"\boxed{A}, \boxed{C}", "AC", "correct"),
        (r"\boxed{A}, \boxed{C}", "A", "wrong"),
        ("B is wrong", "B", "unparsed"),
        ("**B** isn't right", "B", "unparsed"),
        ("Answer B is incorrect.", "B", "unparsed"),
        ("B) is wrong. It is C.", "C", "correct"),
        ("Anything but B", "B", "unparsed"),
        ("It is C rather than B.", "C", "correct"),
        ("It is not A, but B", "B", "correct"),
        ("A is tempting, but B fits.", "B", "correct"),
        ("Neither A nor B", "B", "unparsed"),
        ("Both A and B", "B", "wrong"),
        ("Both A and B", "AB", "correct"),
        ("The answer is both A and B.", "A", "wrong"),
        ("Both A and B are wrong.", "A", "unparsed"),
        ("Both A and B are wrong, so it is C", "C", "correct"),
        ("A) 3 B) 4 C) 5 D) 6", "D", "unparsed"),
        ("(A) 3\n(B) 4\n(C) 5", "A", "unparsed"),
        ("A. 3\nB. 4\nC. 5\n\nB", "B", "correct"),
        ("Answer choices: A: 3, B: 4", "A", "unparsed"),
        ("A) 3 B) 4. The answer is A) 3.", "A", "correct"),
        ("A) 3, since B) is wrong", "A", "correct"),
    ],
)
def test_choice(completion: str, gold: str, outcome: str) -> None:
    assert choice.verify(completion, gold).outcome == outcome


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        (r"\boxed{2\pi\sqrt{3}}", "2*pi*sqrt(3)", "correct"),
        (r"\boxed{x^2 - 1}", "(x - 1)*(x + 1)", "correct"),
        (r"\boxed{\frac{1}{2}}", "Rational(1, 2)", "correct"),
        ("x**2 + 1", "x**2 + 2", "wrong"),
        (r"\boxed{10.8827961854053}", "2*pi*sqrt(3)", "wrong"),
        (r"\boxed{[0,1]}", "Interval(0, 1)", "correct"),
        (r"\boxed{[0,1)}", "Interval(0, 1)", "wrong"),
        (r"\boxed{[0,1)}", "Interval.Ropen(0, 1)", "correct"),
        (r"\boxed{4}", "x = 4", "correct"),
        (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", "Matrix([[1, 2], [3, 4]])", "correct"),
        (r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}", "Matrix([[1, 2], [3, 4]])", "wrong"),
        (r"\boxed{3+4i}", "3 + 4*I", "correct"),
        (r"\boxed{yx}", "x*y", "correct"),
        (r"\boxed{π}", "pi", "correct"),
        (r"\boxed{\text{no solution}}", "EmptySet", "correct"),
        (r"\boxed{5\text{ cm}}", "5", "correct"),
        (r"\boxed{2 \text{ or } 5}", "5", "wrong"),
        (r"\boxed{1}", "factorial(10**9)", "error"),
        (r"\boxed{1}", "9**9**9**9", "error"),
        (r"\boxed{7}", "__import__('os').system('true')", "error"),
        (r"\boxed{7}", "x.diff(y)", "error"),
    ],
)
def test_golds_in_the_notation_of_python(completion: str, gold: str, outcome: str) -> None:
    assert math.verify(completion, gold, dialect="sympy").outcome == outcome


def test_a_tolerance_is_relative_to_the_gold() -> None:
    given = r"\boxed{6.63\times10^{-34}}"
    assert math.verify(given, "6.626e-34", relative_tolerance=0.01).outcome == "correct"
    assert math.verify(given, "6.626e-34", relative_tolerance=1e-5).outcome == "wrong"
    assert numeric.verify("6.63e-34", "6.626e-34", relative_tolerance=0.01).outcome == "correct"
    assert numeric.verify("6.63e-34", "6.626e-34").outcome == "wrong"


def test_a_tolerance_holds_inside_tuples_and_matrices() -> None:
    for given, outcome in ((r"(100.5, 1, 2)", "correct"), (r"(102, 1, 2)", "wrong")):
        verdict = math.verify(rf"\boxed{{{given}}}", "(100, 1, 2)", relative_tolerance=0.01)
        assert verdict.outcome == outcome
    matrix = r"\begin{pmatrix}100\\1\end{pmatrix}"
    near, far = (matrix.replace("100", number) for number in ("100.5", "102"))
    assert math.verify(rf"\boxed{{{near}}}", matrix, relative_tolerance=0.01).outcome == "correct"
    assert math.verify(rf"\boxed{{{far}}}", matrix, relative_tolerance=0.01).outcome == "wrong"
    assert math.verify(r"\boxed{x=100.5}", "x=100", relative_tolerance=0.01).outcome == "correct"


def test_a_value_within_the_tolerance_of_two_golds_is_given_to_the_right_one() -> None:
    gold = '{"all": ["1.0", "1.1"], "tolerance": 0.1}'
    assert math.verify(r"\boxed{1.1, 0.95}", gold).outcome == "correct"
    assert math.verify(r"\boxed{1.1, 0.85}", gold).outcome == "wrong"


def test_several_golds_may_carry_a_tolerance() -> None:
    gold = '{"all": ["1.0", "2.0"], "tolerance": 0.1}'
    assert math.verify(r"\boxed{2.05, 0.95}", gold).outcome == "correct"
    assert math.verify(r"\boxed{2.05, 0.85}", gold).outcome == "wrong"
    assert numeric.verify("0.95 and 2.05", gold).outcome == "correct"


@pytest.mark.parametrize("text", ["$", "(", "{", ",", "or ", r"\text{", r"\[", "1,", r"\frac{"])
def test_hostile_text_takes_little_time(text: str) -> None:
    start = time.process_time()
    for completion in (text * 5000, rf"\boxed{{{text * 5000}}}"):
        assert math.verify(completion, "5").outcome != "correct"
    assert time.process_time() - start < 4


@pytest.mark.parametrize(
    "gold",
    ['{"all": []}', '{"any": ["", "1"]}', '{"answer": "1", "tolerance": -1}'],
)
def test_a_gold_form_without_sense_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="the gold"):
        math.verify("1", gold)


@pytest.mark.parametrize(
    ("text", "value", "named"),
    [
        ("5 cm", "5", True),
        ("5m", "5m", False),
        ("5 m", "5", True),
        ("x+5 cm", "x+5 cm", False),
        (r"15\mbox{ cm}^2", "15", True),
        (r"9 \text{ apples}", "9", False),
        (r"\text{Evelyn}", r"\text{Evelyn}", False),
        ("30 miles per hour", "30", True),
    ],
)
def test_a_unit_is_one_only_behind_a_number(text: str, value: str, named: bool) -> None:
    found = units.split(text)
    assert (found[0], found[1] is not None) == (value, named)


@pytest.mark.real_data
def test_every_gold_of_a_published_set_is_right_however_it_is_typeset(real_data: Path) -> None:
    """One in five of MATH's golds, in six spellings; the next row's gold is not right."""
    rows = json.loads((real_data / "math_train" / "math.json").read_text())
    golds = list(dict.fromkeys(str(row["answer"]) for row in rows if row["answer"]))[::5]
    wrong = [
        (gold, given)
        for gold in golds
        for given in (
            rf"so \boxed{{{gold}}}.",
            rf"\boxed{{{gold}.}}",
            rf"\boxed{{${gold}$}}",
            f"<answer>{gold}</answer>",
            rf"\boxed{{{gold.replace(FRAC, DFRAC)}}}",
            rf"\boxed{{\boxed{{{gold}}}}}",
        )
        if math.verify(given, gold).outcome != "correct"
    ]
    assert (len(golds), wrong) == (579, [])
    mistaken = [
        (gold, other)
        for gold, other in itertools.pairwise(golds)
        if math.verify(rf"\boxed{{{other}}}", gold).outcome == "correct"
    ]
    assert mistaken == []
