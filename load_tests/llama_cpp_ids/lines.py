"""1,000 lines on which tokenizers differ: code, tables, numbers, runs of one character, control
tokens, and texts in Latin, Cyrillic, Greek, Arabic, Devanagari, Han and other scripts. All of it
was made up for this."""

import random

_WORDS = {
    "latin": "harbour ship don't I'VE they'll naïve über façade Zürich résumé coöperate Straße œuvre McDonald "
    "HTTPServer camelCase snake_case well-known e-mail x2 B2B iPhone İstanbul ŁÓDŹ ﬁnd ñandú 'quoted' "
    "“curly” l'eau O'Neil",
    "cyrillic": "корабль идёт в гавань Москва съешь ещё МИР объём по-русски 5-й км/ч Київ їжак ґанок",
    "greek": "η θάλασσα Αθήνα πλοίο λιμάνι ΕΛΛΑΔΑ ἄνθρωπος ᾠδή μετά και",
    "arabic": "السفينة في الميناء مَدْرَسَة كتابٌ ٣٫١٤ ١٢٣ لا إله؟ ، ؛ پارسی می‌شود",
    "devanagari": "जहाज़ बंदरगाह में है नमस्ते क्षत्रिय १२३ प्रश्न। हिन्दी",
    "han": "船在港口 北京 你好，世界。 三十五 「引號」 東京タワー ひらがな カタカナ ー々 ﾊﾝｶｸ",
    "hangul": "배가 항구에 있다 서울 한국어 ㅋㅋㅋ 안녕하세요?",
    "thai": "เรือ อยู่ที่ ท่าเรือ ๑๒๓ กรุงเทพฯ",
    "hebrew": "הספינה בנמל שָׁלוֹם ת״א",
    "bengali": "জাহাজ বন্দরে আছে ১২৩",
    "emoji": "😀 👩‍🚀 🇨🇭 👍🏽 ❤️ ☕ ½ ² ³ Ⅷ ① ﹏ ‽ … — – § € ¥ ₿ ™ ℃ ∑ ≠ √2 ᵃ ʰ",
}
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    " \n",
    "\n ",
    "\r\n",
    "\r\n\r\n",
    "\n\n\n  ",
    "\u00a0",
    "\u3000",
    "\u2003",
)
_CODE = (
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # circle\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i] * 0x1F;\n}\n",
    "const f = async ({a, b = 2}) => `${a}:${b}`;\n",
    "SELECT name, COUNT(*) FROM ships WHERE tons >= 1200 GROUP BY 1;\n",
    'printf("%5.2f\\t%s\\n", x / y, "ok");\n',
    "if [ -f ~/.rc ]; then echo \"$HOME\" | sed 's/a/b/g'; fi\n",
    "key: &anchor\n  - item: 1\n    note: >-\n      folded\n",
    '{"a": [1, 2.50, -3e10, null], "b": {"c": "\\u00e9"}}\n',
    "#include <stdio.h>\n#define MAX(a,b) ((a)>(b)?(a):(b))\n",
    "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }\n",
    "x = y if z else [i**2 for i in range(1_000)]\n",
    "<div class=\"row\"><a href='/x?y=1&z=2'>go</a><br/></div>\n",
    "<table><tr><td>1</td><td><b>2</b></td></tr></table>\n",
    "git commit -m 'fix(#123): v1.2.3-rc.4'\n",
    "\\frac{1}{2} \\sum_{i=0}^{n} x_i^2 = \\alpha\n",
    "let v: Vec<u8> = vec![0; 1024]; // ::new()\n",
)
_CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "</s>",
    "<s>",
    "<unk>",
    "<unused7>",
    "<0x0A>",
    "[INST]",
    "<tool_call>",
    "<|im_end",
    "im_end|>",
    "<h1>",
    "</code>",
)
_RUNS = " \n\t-=_.#*~/\\0a1'\"!é中😀\u00a0"


def _number(rng: random.Random) -> str:
    digits = str(rng.randrange(10 ** rng.randint(1, 12)))
    return rng.choice(
        (
            digits,
            f"{int(digits):,}",
            f"{int(digits) / 1000:.3f}",
            f"-{digits}",
            f"{digits}%",
            f"${digits}.{rng.randrange(100):02}",
            f"{rng.randrange(24):02}:{rng.randrange(60):02}",
            f"{rng.randrange(1900, 2100)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            f"192.168.{rng.randrange(256)}.{rng.randrange(256)}",
            f"0x{int(digits):X}",
            f"{digits[0]}e{rng.randint(-9, 9)}",
            f"v{digits[0]}.{rng.randrange(20)}.{rng.randrange(20)}",
            f"{digits}th",
            f"x{digits}y",
        )
    )


def _words(rng: random.Random, script: str) -> list[str]:
    return rng.choices(_WORDS[script].split(), k=rng.randint(1, 8))


def _prose(rng: random.Random) -> str:
    parts = _words(rng, rng.choice(list(_WORDS)))
    if rng.random() < 0.4:
        parts += [_number(rng), *_words(rng, "latin")]
    if rng.random() < 0.5:
        parts = [part + rng.choice(("", "", ",", ".", "!", "?", ":", ";", "...", "?!", ")")) for part in parts]
    return rng.choice(("", " ", "\n")) + " ".join(parts)


def _mixed(rng: random.Random) -> str:
    parts = [_words(rng, rng.choice(list(_WORDS)))[0] for _ in range(rng.randint(2, 7))]
    return "".join(part + rng.choice(_SPACES) for part in parts)


def _list(rng: random.Random) -> str:
    breaks, mark = (
        rng.choice(("\n", "\n\n", "\r\n", "\n  ", "\n\t")),
        rng.choice(("{}.", "{})", "- {}:", "*{}*", "({})")),
    )
    return "".join(f"{breaks}{mark.format(i)} {rng.choice(_words(rng, 'latin'))}" for i in range(1, rng.randint(2, 5)))


def _table(rng: random.Random) -> str:
    left, between, right = rng.choice(
        (("| ", " | ", " |\n"), ("", ",", "\n"), ("", "\t", "\n"), ("  ", "   ", "\r\n"), ("|", "|", "|\n"))
    )
    cells = [[rng.choice((_number(rng), rng.choice(_words(rng, "latin")), "")) for _ in range(3)] for _ in range(2)]
    rule = "|---|:-:|---:|\n" if left == "|" else ""
    return rule.join(left + between.join(row) + right for row in cells)


def _code(rng: random.Random) -> str:
    indent = rng.choice(("", "    ", "\t", "        ", "  \t"))
    lines = "".join(rng.sample(_CODE, 2)).splitlines(keepends=True)[: rng.randint(1, 4)]
    return "".join(indent + line for line in lines).replace("x", rng.choice(("x", "value", "nextIndex", "k9")))


def _run(rng: random.Random) -> str:
    run = "".join(
        rng.choice(_RUNS) * rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 70)) for _ in range(rng.randint(1, 4))
    )
    return rng.choice(("", "a", "1", "x = ")) + run + rng.choice(("", "b", "2", "."))


def _marked(rng: random.Random) -> str:
    parts = [rng.choice(_CONTROL) if rng.random() < 0.5 else rng.choice(_words(rng, "latin")) for _ in range(4)]
    return "".join(part + rng.choice(("", "", " ", "\n", "  ")) for part in parts)


def _raw(rng: random.Random) -> str:
    """Any characters of the first planes, the assigned ones of old Unicode versions."""
    ranges = (
        (0x20, 0x7F),
        (0x20, 0x7F),
        (0xA1, 0x17F),
        (0x391, 0x3CA),
        (0x410, 0x450),
        (0x4E00, 0x9FA5),
        (0x1F600, 0x1F640),
        (0x2190, 0x21FF),
    )
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 30)))


_KINDS = (_prose, _prose, _mixed, _list, _table, _code, _run, _marked, _raw, _number)


def make_lines(count: int = 1000, seed: int = 44) -> list[str]:
    """Different lines, none of them empty."""
    rng = random.Random(seed)
    lines: dict[str, None] = {}
    while len(lines) < count:
        line = _KINDS[len(lines) % len(_KINDS)](rng)
        if line:
            lines[line] = None
    return list(lines)
