"""Pairs of prompts labelled by hand: leaks (the same problem, published or written again in another
form) and problems that only look alike.

A pair is a leak if who knows the answer of one knows that of the other from the text alone, without
solving anything. A problem with other numbers, names that matter, or another question is none."""

from typing import NamedTuple


class Pair(NamedTuple):
    kind: str
    train: str
    evaluation: str


HILL = (
    "A farmer has 12 cows and 30 sheep on the hill. How many animals does the farmer have on the "
    "hill in all?"
)
PAINT = (
    "Lena paints a fence of 48 boards. She paints 6 boards an hour and takes a break of 2 hours "
    "after half of them. How many hours pass until the fence is painted?"
)
UNIT = (
    "Let $ABCD$ be a unit square in the plane. Points $X$ and $Y$ are chosen independently and "
    "uniformly at random on the perimeter of $ABCD$. What is the expected area of triangle $AXY$?"
)
ROOTS = "Find the sum of the squares of the roots of the equation $3x^2 - 7x + 1 = 0$."
BOXES = (
    "There are $7$ boxes arranged in a row and numbered $1$ through $7$. You have a stack of "
    "$2015$ cards, which you place one by one in the boxes, from the first to the last and back. "
    "What box will the last card be placed in?"
)
MOUNTAIN = (
    "A hiker climbs a mountain of 2400 meters. On the first day she climbs a third of it, on the "
    "second day half of the rest. How many meters are left for the third day?"
)
BAKERY = (
    "A bakery sells muffins for $2.50 each and sandwiches for $4 each. On Saturday it sold 36 "
    "muffins and 15 sandwiches. How much money did the bakery take in on Saturday?"
)
LATTICE = (
    "How many lattice points are on the boundary or inside the region bounded by $y=|x|$ and "
    "$y=-x^2+6$?"
)
FUNCTION = (
    "A function $f$ has the property that $f(3x-1)=x^2+x+1$ for all real numbers $x$. What is "
    "$f(5)$?"
)
TANK = (
    "A tank is filled by one pipe in 6 hours and emptied by another pipe in 9 hours. If both pipes "
    "are open and the tank is empty at first, after how many hours is it full?"
)
TRIANGLE = '[asy] draw((0,0)--(4,0)--(4,3)--cycle); label("$5$", (2,2), NW); [/asy]'
SQUARE = '[asy] draw((0,0)--(2,0)--(2,2)--(0,2)--cycle); label("$7$", (1,0), S); [/asy]'
MINIMUM = "Find the minimum value of $x^2 + xy + y^2$ over all real numbers $x$ and $y.$"
PATHS = (
    "How many paths of length $n$ are there from the lower left corner of the grid to its upper "
    "right corner?"
)
SHADED = "In the figure below, what is the area of the shaded part of the triangle?"

LEAKS = [
    # an instruction around it
    Pair("wrapper", HILL, HILL + " Let's think step by step and put the final answer in a box."),
    Pair("wrapper", "Solve the following problem. " + UNIT, UNIT),
    Pair("wrapper", f"Question: {PAINT}\nAnswer:", PAINT),
    Pair("wrapper", ROOTS + " Give your answer as a common fraction.", ROOTS),
    Pair("wrapper", "You are a careful tutor. " + BOXES + " Show your work.", BOXES),
    Pair("wrapper", LATTICE, LATTICE + " Please reason step by step."),
    # what publishers add: the form of the answer, a value, a figure, options, a source
    Pair(
        "added",
        ROOTS
        + " The original answer is in the form $\\frac{k}{m}$, please give the value of k + m.",
        ROOTS,
    ),
    Pair("added", PATHS, PATHS.replace("?", " when $n = 9$?")),
    Pair("added", TANK + "\n\n" + TRIANGLE, TANK),
    Pair("added", UNIT, UNIT + " *Proposed by A. Author*"),
    Pair("added", LATTICE, "**Problem 7** (Round 2, 2011)\n\n" + LATTICE),
    Pair("added", BOXES, "12. (5 points) " + BOXES + " (2010 AIME I, Problem 9)"),
    Pair(
        "added",
        PAINT,
        PAINT + "\n$\\textbf{(A)}\\ 8\\qquad\\textbf{(B)}\\ 9\\qquad\\textbf{(C)}\\ 10$",
    ),
    Pair("added", FUNCTION, FUNCTION + " Find the remainder when the result is divided by 1000."),
    Pair(
        "added",
        UNIT,
        UNIT.replace("What is the", "If the").replace(
            "?", " can be expressed as $\\frac{m}{n}$ for coprime $m$ and $n$, compute $m+n$."
        ),
    ),
    Pair("added", HILL + " Round your answer to 2 decimal places.", "Problem 3. " + HILL),
    # punctuation, letter case, white space
    Pair("signs", HILL, HILL.replace(".", " .").replace("?", " ?").upper()),
    Pair("signs", PAINT, PAINT.replace(". ", "; ").replace("She", "she")),
    Pair("signs", BAKERY, BAKERY.replace("$", "\\$")),
    Pair("signs", MOUNTAIN, MOUNTAIN.replace(", on the", " and, on the")),
    Pair("signs", TANK, TANK.replace(",", "").replace(".", ":")),
    # LaTeX and plain text
    Pair("latex", BOXES, BOXES.replace("$", "")),
    Pair("latex", UNIT, UNIT.replace("$", "").replace("ABCD", "\\(ABCD\\)")),
    Pair("latex", ROOTS, ROOTS.replace("3x^2 - 7x + 1 = 0", "3x^{2}-7x+1=0")),
    Pair("latex", FUNCTION, FUNCTION.replace("f(3x-1)", "f\\left(3x-1\\right)")),
    Pair(
        "latex",
        "What is the greatest integer less than $\\dfrac{7}{2}$ times the square root of 200?",
        "What is the greatest integer less than $\\frac72$ times the square root of 200?",
    ),
    Pair(
        "latex",
        "The area of a circle is $25\\pi$ square centimeters. What is its circumference, in cm?",
        "The area of a circle is $25 \\pi$ square centimeters. What is its circumference, in cm?",
    ),
    # numbers written in another way
    Pair("numbers", BOXES, BOXES.replace("2015", "2,015")),
    Pair("numbers", MOUNTAIN, MOUNTAIN.replace("2400", "2{,}400")),
    Pair("numbers", BAKERY, BAKERY.replace("$2.50", "$2.5")),
    Pair("numbers", BAKERY, BAKERY.replace("$4 ", "$4.00 ")),
    Pair("numbers", HILL, HILL.replace("12 cows", "twelve cows")),
    Pair(
        "numbers",
        "A store sells 3/4 of its 1,200 lamps in May. How many lamps does it keep?",
        "A store sells $\\frac{3}{4}$ of its 1200 lamps in May. How many lamps does it keep?",
    ),
    # slightly other words
    Pair("words", HILL, HILL.replace("the hill. How", "a hill. How")),
    Pair("words", HILL, HILL.replace("on the hill in all", "on the hill altogether")),
    Pair("words", PAINT, PAINT.replace("takes a break", "rests for a break")),
    Pair("words", ROOTS, ROOTS.replace("Find the sum", "What is the sum").replace(".", "?")),
    Pair("words", UNIT, UNIT.replace("What is", "Compute").replace("?", ".")),
    Pair("words", BAKERY, BAKERY.replace("did the bakery take in", "did the bakery earn")),
    Pair("words", MOUNTAIN, MOUNTAIN.replace("How many meters are left", "How much is left")),
    Pair("words", FUNCTION, FUNCTION.replace("A function $f$ has the property", "Suppose")),
    Pair("words", TANK, TANK.replace("is empty at first", "is at first empty")),
    Pair("words", LATTICE, LATTICE.replace("How many lattice", "How many of the lattice")),
    Pair(
        "words",
        "Compute $\\sin 60^\\circ$ exactly.",
        "Compute the exact value of $\\sin 60^\\circ$.",
    ),
]


def story(problem: str) -> str:
    """A problem without its question."""
    return problem.split(" How")[0]


TEMPLATES = {
    "letters": "In how many ways can you arrange the letters of the word {}?",
    "distinct": "How many distinct arrangements of the letters in the word {} are there?",
    "capital": "What is the capital of the country that won the football world cup in {}?",
    "primes": "What is the sum of the distinct prime factors of {}?",
    "convert": "Convert the number {} from base ten to base three.",
    "inverse": "Find the inverse of the function $f(x) = {}$ wherever it is defined.",
}


def template(name: str, one: str, other: str) -> Pair:
    return Pair("template", TEMPLATES[name].format(one), TEMPLATES[name].format(other))


DIFFERENT = [
    # one template, another thing in it
    template("letters", "BANANA", "MINIMUM"),
    template("letters", "ELEPHANT", "KAYAK"),
    template("distinct", "balloon", "coffee"),
    template("capital", "1974", "1978"),
    template("primes", "210", "2310"),
    template("convert", "87", "88"),
    template("inverse", "e^x", "\\ln x"),
    Pair(
        "template",
        "Find $d$, given that the line $y = dx$ is tangent.",
        "Find $d$, given that it is prime.",
    ),
    Pair(
        "template",
        "What is the value of $\\sin 60^\\circ$?",
        "What is the value of $\\cos 60^\\circ$?",
    ),
    Pair(
        "template",
        "Spell the word elephant backwards and write only the letters.",
        "Spell the word kangaroo backwards and write only the letters.",
    ),
    Pair(
        "template",
        "How many vowels are in the name of the month of January?",
        "How many vowels are in the name of the month of October?",
    ),
    # other numbers, signs or order
    Pair("numbers", HILL, HILL.replace("12", "13")),
    Pair("numbers", HILL, HILL.replace("12 cows and 30 sheep", "30 cows and 12 sheep")),
    Pair("numbers", PAINT, PAINT.replace("48", "60")),
    Pair("numbers", ROOTS, ROOTS.replace("- 7x", "+ 7x")),
    Pair("numbers", FUNCTION, FUNCTION.replace("f(5)", "f(8)")),
    Pair("numbers", BOXES, BOXES.replace("2015", "2016")),
    Pair("numbers", BAKERY, BAKERY.replace("2.50", "2.05")),
    Pair("numbers", TANK, TANK.replace("9 hours", "8 hours")),
    Pair("numbers", LATTICE, LATTICE.replace("-x^2", "x^2")),
    # more in the same formula, a step more in the same story, another figure
    Pair("more", MINIMUM, MINIMUM.replace("xy + y^2", "xy + y^2 - 3x + 3y + 9")),
    Pair("more", HILL, HILL.replace("How", "The farmer buys 7 pigs. How")),
    Pair("more", ROOTS, ROOTS.replace("1 = 0", "1 = 0$ and $x^2 - 2 = 0")),
    Pair(
        "more",
        "Let $f(x)$ be an odd function on the real line. Is $f(f(x))$ even, odd, or neither?",
        "Let $f(x)$ be an odd function on the real line. Is $f(f(f(x)))$ even, odd, or neither?",
    ),
    Pair(
        "more",
        "Which of the following is the graph of the function $y = |f(x)|$ as drawn above?",
        "Which of the following is the graph of the function $y = f(|x|)$ as drawn above?",
    ),
    Pair(
        "more",
        story(PAINT) + " Find the hours until it is painted and put the final answer in a box.",
        story(PAINT) + " Find the boards before the break and put the final answer in a box.",
    ),
    Pair(
        "more",
        "Let $x$ be a root of $x^2 - 3x + 1 = 0$ in the plane. Please give the value of $x^2$.",
        "Let $x$ be a root of $x^2 - 3x + 1 = 0$ in the plane. Please give the value of $x^3$.",
    ),
    Pair("figure", SHADED + "\n" + TRIANGLE, SHADED + "\n" + SQUARE),
    Pair("figure", "What is the area, in square units, of triangle $ABC$? " + TRIANGLE, PAINT),
    Pair(
        "figure",
        "What is the area, in square units, of triangle $ABC$? " + TRIANGLE,
        "What is the area, in square units, of triangle $ABC$ with $AB = 3$ and $BC = 4$?",
    ),
    # other names and things in the same story
    Pair(
        "names",
        "Tom has 5 apples and gives 2 of them to Sue. How many apples does Tom have now?",
        "Ann has 5 pencils and gives 2 of them to Bob. How many pencils does Ann have now?",
    ),
    Pair(
        "names",
        "Mia reads 20 pages of her novel a day for 6 days. How many pages does Mia read?",
        "Leo runs 20 laps of his track a day for 6 days. How many laps does Leo run?",
    ),
    Pair(
        "names",
        "Who painted the ceiling of the chapel in Rome that the pope had built?",
        "Who painted the ceiling of the opera in Paris that the emperor had built?",
    ),
    Pair(
        "names",
        "How many protons does an atom of sodium have in its nucleus?",
        "How many protons does an atom of copper have in its nucleus?",
    ),
    Pair(
        "names",
        "In which year was the author of the novel Emma born?",
        "In which year was the author of the novel Ulysses born?",
    ),
    # another quantity is asked for
    Pair(
        "asked",
        "A rectangle has a length of 8 cm and a width of 5 cm. What is the rectangle's area?",
        "A rectangle has a length of 8 cm and a width of 5 cm. What is the rectangle's perimeter?",
    ),
    Pair("asked", PAINT, story(PAINT) + " How many boards are painted before the break?"),
    Pair("asked", BAKERY, story(BAKERY) + " How many more muffins than sandwiches were sold?"),
    Pair("asked", HILL, story(HILL) + " How many more sheep than cows does the farmer have?"),
    Pair("asked", ROOTS, ROOTS.replace("sum of the squares", "product")),
    Pair("asked", UNIT, UNIT.replace("expected area of triangle", "expected length of segment")),
    Pair("asked", MOUNTAIN, story(MOUNTAIN) + " How many meters does she climb on the second day?"),
    Pair(
        "asked",
        "The points $A$, $B$ and $C$ lie on a circle of radius 4. What is the triangle's largest "
        "area?",
        "The points $A$, $B$ and $C$ lie on a circle of radius 4. What is the triangle's largest "
        "perimeter?",
    ),
    # nothing but common words
    Pair("common", "How many animals are on the hill?", HILL),
    Pair(
        "common",
        "What is the value of $x$ in the figure?",
        "What is the value of $x$ in the equation?",
    ),
    Pair("common", "How many of them are there in all?", "How many of them are left in all?"),
]
