"""Verdicts in the replies of a model that judges: one of two words, alone, in a sentence, in JSON or in bold text."""

from __future__ import annotations

import re

# thoughts with their end, whose beginning the template of some models writes, and without one
_THOUGHTS = re.compile(r"\A.*(?:</think(?:ing)?>|\[/THINK\]|<\|channel\|>final<\|message\|>|assistantfinal)", re.DOTALL)
_UNFINISHED = re.compile(r"(?:<think(?:ing)?>|\[THINK\]|<\|channel\|>analysis|\Aanalysis(?! )).*", re.DOTALL)
# what LaTeX, JSON and Markdown write around a word
_REPLACED = (
    ("\N{RIGHT SINGLE QUOTATION MARK}", "'"),
    (r"\\boxed\b", "verdict: "),
    (r"\\text\w*\b", ""),
    (r"\\n", "\n"),
    (r"[*_`\"\[\]{}$#\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}]|(?<!\w)'|'(?!\w)", ""),
    (r"\((\w+)\)", r"\1"),
    (r"[ \t]+", " "),
)
# In the patterns, X and Y are the two words, and all else is in lower case.
_SENTENCE = re.compile(r"(?<=[.!?]) |[\n;]+")
_DOUBT = re.compile(
    r"\b(?:not|never|neither|nor|none|nothing|cannot|hardly|barely|if|whether|unless|could|might|may|almost|nearly|between"
    r"|would (?:be|have)|no(?!,))\b|n't\b"
)
_NOUN = r"(?:(?:the )?(?:answer|response|option|assistant) )?"
_ADVERBS = r"(?:(?:really|very|clearly|definitely|overall|quite|actually|indeed|certainly|simply|much|slightly) )*"
_END = (
    r"(?= ?(?:$|[.;!()\u2013\u2014\u2192]|,(?! or\b)|-|\b(?:because|since|as|by|according|under|overall|but|than|over)\b"
    rf"|and\b(?! {_NOUN}[XY])))"
)
_I_SAY = r"i(?:'d| would)? (?:say|choose|pick|prefer)"
_START = rf"(?:^|[,:\u2013\u2014\u2192] ?|->? )(?:(?:so|thus|therefore|hence|then|yes|{_I_SAY}) )*"
_I_RATE = r"(?:rate|judge|label|consider|classify|call|deem)(?: (?:it|this|that|(?:the|this) (?:answer|response)))?"
_SAYS = rf"\b(?:is|was|it's|that's|be|choose|prefer|pick|select|say|{_I_RATE}(?: as| to be)?) "
_NAMED = re.compile(
    r"\b(?:verdict|judge?ment|decision|conclusion|final answer|winner|overall)(?: ?(?:is\b|[:=\u2013\u2014\u2192]|->?))+ ?"
    rf"{_NOUN}([XY])\b{_END}"
)
_STATED = re.compile(
    rf"(?:{_START}|{_SAYS}(?:an? )?){_ADVERBS}{_NOUN}([XY])\b(?: (?:answer|response|reply|one)\b)?{_END}"
    rf"|\b([XY]) (?:wins\b|(?:is|was) {_ADVERBS}(?:the )?(?:better|best|superior|stronger|preferable|preferred|winner)\b)"
)


def read_verdict(reply: str, words: tuple[str, str]) -> bool | None:
    """Return whether the verdict of a reply is the first of two words; None if it is ambiguous, or there is none.

    Words of one letter count in upper case. A verdict that is named as such (``verdict: good``, also in JSON) goes before
    what sentences state (``The answer is good.``); questions, negations and conditions state nothing.
    """
    text = _UNFINISHED.sub("", _THOUGHTS.sub("", reply, count=1))
    for pattern, instead in _REPLACED:
        text = re.sub(pattern, instead, text)
    if (said := text.strip(" \n.").lower()) in (known := [word.lower() for word in words]):
        return said == known[0]
    for word, mark in zip(words, "\0\1", strict=True):
        text = re.sub(rf"\b{word}\b", mark, text, flags=0 if len(word) == 1 else re.IGNORECASE)
    text = text.lower().replace("\0", "X").replace("\1", "Y").strip()
    found = set(_NAMED.findall(text))
    for sentence in [] if found else map(str.strip, _SENTENCE.split(text)):
        doubt = _DOUBT.search(sentence)
        for match in _STATED.finditer(sentence):
            if not sentence.endswith("?") and (doubt is None or doubt.end() > match.end()):
                found |= {*match.groups()} - {None}
    return found == {"X"} if len(found) == 1 else None
