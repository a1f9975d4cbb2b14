"""Compare methods: run them with the same data and seeds, and show their results side by side.

A comparison is a `Plan`: names with the settings of each, and seeds. `carry_out` runs what has not been run yet and
returns the content of comparison.json. The tables, the CSV file, the Markdown file and the picture are made from that
content alone. A run is identified by the hash of its settings and samples. So a finished run in `output-dir` is not
repeated, whoever ran it, and an interrupted run is resumed.

    compare-WHAT-HASH/comparison.json   everything; the same comparison always has the same folder
    compare-WHAT-HASH/comparison.csv    a line for each run, and for the mean and the standard deviation of each method
    compare-WHAT-HASH/comparison.md     the tables, settings, runs and notes, for people to read
    compare-WHAT-HASH/comparison.png    headline metric over rounds, mean and standard deviation over seeds
    compare-WHAT-HASH/varied.png        headline metric over the values of a varied setting
    compare-WHAT-HASH/weights.png       weights over rounds of variants of one method, where they change
    compare-WHAT-HASH/report.html       all of it in one page

| file | task |
| --- | --- |
| `plan.py` | what is compared |
| `variation.py` | the setting that is varied |
| `runs.py` | run it |
| `statistics.py` | compute the content of comparison.json |
| `texts.py` | make tables and remarks from that content |
| `files.py` | write the files |
| `pictures.py` | draw the pictures |
| `result.py` | the object that `kindred.compare` returns |
| `metrics.py` | list the numbers of a run |
"""
