"""A few prompts of our own writing, one a task, for quick measurements."""

PROMPTS: dict[str, str] = {
    "writing": "Write a short letter to a neighbour who has found your lost cat.",
    "reasoning": "Anna is taller than Ben, and Ben is taller than Cleo. Who is the shortest? Explain.",
    "maths": "A shop sells pens at 3 for 2 euros. How much do 12 pens cost? Show the steps.",
    "coding": (
        "Write a Python function celsius(f) that converts degrees Fahrenheit to Celsius, with a "
        "docstring, and a second one fahrenheit(c) that does the reverse."
    ),
    "extraction": (
        "List every city in this text, one a line: From Lisbon we took the train to Madrid, "
        "stayed two nights in Zaragoza, and flew from Barcelona to Milan."
    ),
    "summarisation": (
        "Summarise in two sentences: Tides are the rise and fall of sea levels caused by the "
        "gravity of the Moon and the Sun and by the rotation of the Earth. Most coasts have two "
        "high tides a day. When Sun and Moon pull in one line, at new and full moon, the tides "
        "are highest; they are called spring tides. At half moon they are lowest: neap tides."
    ),
    "translation": "Translate into French: The library opens at nine and closes at six.",
    "json": 'Turn this into JSON with the keys name, age and town: "Mara is 31 and lives in Graz."',
}
