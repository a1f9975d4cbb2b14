"""Which method for these clients? Methods run with the same data and seeds, and what came out side by side.

A comparison is a `Plan`: names with the settings of each, and seeds. `carry_out` runs what has not been run yet and
gives the content of comparison.json; the tables, the CSV file, the Markdown file and the picture are made of that
alone. A run is known by the hash of its settings and images, so that whatever lies in `output-dir` is not run again,
whoever ran it, and what was cut short is gone on with.

    compare-WHAT-HASH/comparison.json   everything; the same comparison always has the same folder
    compare-WHAT-HASH/comparison.csv    a line for each run, and for the mean and deviation of each method
    compare-WHAT-HASH/comparison.md     the table, settings, runs and notes, to be read
    compare-WHAT-HASH/comparison.png    accuracy over rounds, mean and deviation over seeds
    compare-WHAT-HASH/report.html       all of it in one page

`plan.py` says what is compared, `runs.py` runs it, `statistics.py` computes the content of comparison.json, `texts.py`
makes tables and remarks of that, `files.py` writes the files, `result.py` has the object that `kindred.compare`
returns. `metrics.py` lists the numbers of a run.
"""
