"""The paper's evaluation protocols on a run: what is measured, on which encoders."""
