"""Running a model and recording its layers: the tape, the recorder around it, the checks of what was recorded."""
