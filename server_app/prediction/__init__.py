"""Use of a personal model from its file: predictions, and their evaluation on a site's test data.

The file of a model names its network and its input (`data.Task`). So neither a server nor settings nor the training
data are needed. All files are plain arrays and texts; nothing in them is executed.
"""

INPUTS = (
    "a folder of image files, one image file, an .npz file with an array x or x_test, a .csv file with the columns of "
    "the model's schema, or a .txt file"
)
