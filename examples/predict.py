"""One call per prediction through tritonpilot.client: rows that are asked for together travel together.

python examples/predict.py --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from rows import first_rows

from tritonpilot.client import Client, InputError

ROWS, THREADS = 200, 32

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8000")
url = parser.parse_args().url

dense, categorical = first_rows(ROWS)

with Client(url, caller_class="realtime", deadline_ms=2000) as client:

    def click_probability(row: int) -> float:
        answer = client.predict("ctr", {"dense": dense[row], "categorical": categorical[row]})
        return float(answer["prob"][0])

    print("click probabilities:", [round(click_probability(row), 4) for row in range(3)])

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(click_probability, range(ROWS)))
    print(f"{len(found)} answers to {THREADS} threads, mean click probability {sum(found) / len(found):.4f}")

    try:
        client.predict("ctr", {"dense": dense[0][:27], "categorical": categorical[0]})
    except InputError as error:
        print(f"refused before it was sent, for {error.field}: {error}")
