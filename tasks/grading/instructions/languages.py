"""Detect which of IFEval's thirty languages a text is in, by its script and by common words.

Most scripts belong to one language here. Languages with a shared script are distinguished by
letters that only one of them has (Russian, Ukrainian, Bulgarian; Arabic, Persian, Urdu) or by their
commonest words (Hindi, Marathi, Nepali; languages in Latin letters). This is enough for a text of a
few sentences, but cruder than a trained detector: a short or mixed text, or a language outside the
thirty, can be misclassified. For a text without a common word only the script is known, so the text
could be in any language of that script."""

import unicodedata
from collections import Counter
from collections.abc import Mapping

MAX_CHARACTERS = 20_000  # of a text that are examined
MARKS = ".,;:!?\"'()*_।"

# scripts of one language each, by the first word of their characters' Unicode names
SCRIPTS = {
    "BENGALI": "bn",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "HANGUL": "ko",
    "HEBREW": "he",
    "HIRAGANA": "ja",
    "KANNADA": "kn",
    "KATAKANA": "ja",
    "MALAYALAM": "ml",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
}
LETTERS = {
    "CYRILLIC": (("uk", "іїєґ"), ("ru", "ыэё"), ("bg", "")),
    "ARABIC": (("ur", "ٹڈڑےںھ"), ("fa", "پچژگکی"), ("ar", "")),
}
WORDS = {
    "DEVANAGARI": {
        "hi": "है हैं और के में की का को से पर यह था थी नहीं एक",
        "mr": "आहे आहेत आणि च्या मध्ये नाही हे ते या होते तो ती एक",
        "ne": "छ छन् र मा को हो पनि यो गर्न भएको लाई थियो छैन एक",
    },
    "LATIN": {
        "en": "the and of to is in that it for with was you are this not have be on as",
        "es": "el la los las de que y en un una es por con para no se del su más como pero está",
        "pt": "o os as de que e em um uma é por com para não se do da no na mais como mas você",
        "fr": "le la les de des et en un une est que qui dans pour pas sur du avec ce il au sont",
        "de": "der die das und ist in den von zu mit nicht ein eine auf für sich dem es auch ich",
        "it": "il lo la gli di che e in un una è per con non si del della sono più come ma anche",
        "pl": "i w na z się nie do to jest że o jak po co ale za od są dla przez oraz jego",
        "vi": "là và của có không một được cho trong với người này các những để đã tôi bạn khi",
        "sw": "na ya wa kwa ni za katika la cha kuwa hii si au kama yake sana watu hiyo ili",
        "fi": "ja on ei että se oli hän mutta myös kun ovat tai joka niin ole kuin voi mukaan",
    },
}
LANGUAGES = frozenset(
    {*SCRIPTS.values(), *(code for pairs in LETTERS.values() for code, _ in pairs)}
    | {code for words in WORDS.values() for code in words}
)


def could_be(text: str, language: str) -> bool:
    """Return whether a text may be in a language, as far as `language_of` can determine that."""
    found = language_of(text)
    return found in (language, None) or language in WORDS.get(str(found), ())


def language_of(text: str) -> str | None:
    """Return the code of the text's language; its script, in capitals, if only that is known; None
    for a text without letters."""
    text = unicodedata.normalize("NFC", text[:MAX_CHARACTERS].lower())
    scripts = Counter(script_of(letter) for letter in text if letter.isalpha())
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0 and scripts["CJK"] > 0:
        return "ja"
    script = scripts.most_common(1)[0][0]
    if script in WORDS:
        return by_words(text, WORDS[script]) or script
    if script in LETTERS:
        return next(code for code, own in LETTERS[script] if not own or set(own) & set(text))
    return SCRIPTS.get(script, script)


def script_of(letter: str) -> str:
    """Return the script of a letter: the first word of its Unicode name."""
    return unicodedata.name(letter, "").partition(" ")[0]


def by_words(text: str, languages: Mapping[str, str]) -> str | None:
    """Return the language whose common words occur most often in the text; None if none occurs."""
    # vowel signs of Devanagari are not letters, so words are separated by white space only
    found = Counter(word.strip(MARKS) for word in text.split())
    hits = {
        code: sum(found[word] for word in set(common.split())) for code, common in languages.items()
    }
    best = max(hits, key=lambda code: hits[code])
    return best if hits[best] else None
