"""The parity prompts: 60 inputs of many kinds, each a list of chat messages or a raw text."""

from __future__ import annotations

_QUESTIONS = [
    "What is the capital of France?",
    "Explain photosynthesis to a ten-year-old in three sentences.",
    "Write a haiku about a lighthouse in winter.",
    "List five prime numbers greater than 50.",
    "Translate 'good morning, my friend' into Spanish.",
    "What is 17 times 23?",
    "Give me a recipe for pancakes.",
    "Who wrote 'Pride and Prejudice'?",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Name three uses for a paperclip.",
    "What does HTTP status 404 mean?",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "How many legs does a spider have?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Write a short, polite email declining a meeting.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a joke about computers.",
    "What causes tides?",
    "Name the planets of the solar system in order.",
    "How do vaccines work?",
    "Give an example of a metaphor.",
    "What is the boiling point of water at sea level?",
    "Write a limerick about a cat named Tom.",
    "Explain recursion with an example.",
    "What is the largest ocean on Earth?",
    "Write one sentence that contains the words 'lantern', 'harbour' and 'ledger'.",
    "What is machine learning?",
    "How do I boil an egg?",
    "Describe the colour red to someone who has never seen it.",
]

_RAW = [
    "Once upon a time, in a small village by the sea,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "import numpy as np\n\nx = np.arange(10)\nprint(",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "The chemical formula of water is",
    "In 1969, the first humans",
    "<html>\n<head>\n<title>",
    "Q: What is the tallest mountain?\nA:",
    "El perro come la",
    "Bonjour, je m'appelle",
    "こんにちは、",
    "🙂🙃🙂🙃🙂",
    " \n\n\t leading whitespace and",
    "A",
    "3.14159265358979",
    "if (x > 0) {\n  return",
    "- apples\n- bananas\n-",
]

_PARAGRAPH = (
    "The keeper climbs the tower at dusk, trims the wick, winds the clockwork and writes the hour in the log. "
    "When the wind turns to the north-east the fog signal is started and the boats are counted as they come in. "
)

_LONG = [_PARAGRAPH * n + "In summary, the keeper" for n in (1, 2, 3, 4, 6, 8, 10, 12)]

_CHATS = [
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "I am a small assistant."},
        {"role": "user", "content": "And what can you do for me today?"},
    ],
    [
        {"role": "system", "content": _PARAGRAPH * 5},
        {"role": "user", "content": "What does the keeper do at dusk?"},
    ],
]

PROMPTS: list[str | list[dict[str, str]]] = [
    *[[{"role": "user", "content": question}] for question in _QUESTIONS],
    *_RAW,
    *_LONG,
    *_CHATS,
]
