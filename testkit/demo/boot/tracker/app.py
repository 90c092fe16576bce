"""Summarises changes: makes a table of them, groups it, serves the result."""
import flask
import numpy
import pandas

generator = numpy.random.default_rng(7)
changes = pandas.DataFrame({
    "project": generator.integers(0, 500, 300_000),
    "author": generator.integers(0, 40, 300_000),
    "bytes": generator.exponential(80, 300_000),
})
totals = changes.groupby(["project", "author"])["bytes"].agg(["sum", "count"])

app = flask.Flask(__name__)


@app.route("/")
def index():
    return {"sum": float(totals["sum"].sum()), "count": int(totals["count"].sum())}


app.run(host="0.0.0.0", port=8000)
