"""Use of a personal model where its file lies: predictions, and how good they are on a site's test data.

A file of a model says itself which network it is and what it takes (`data.Task`): no server, no settings and none of
the data that it was trained on are needed. All files are plain arrays and texts; nothing in them is run.
"""

INPUTS = (
    "a folder of image files, one image file, an .npz file with an array x or x_test, or a .csv file of numbers with "
    "a header"
)
