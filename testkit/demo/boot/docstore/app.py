"""Stores documents: makes its database with an index of their text when there
is none, then serves them."""
import http.server
import os
import sqlite3
import threading

PATH = "/srv/docs.db"
COUNT = 30000


def initialise():
    db = sqlite3.connect(PATH + ".new")
    db.execute("CREATE TABLE docs (id INTEGER PRIMARY KEY, project INTEGER, body TEXT)")
    db.execute("CREATE INDEX projects ON docs (project)")
    db.execute("CREATE VIRTUAL TABLE words USING fts5(body, content='docs', content_rowid='id')")
    state = 1
    for number in range(COUNT):
        line = []
        for _ in range(20):
            state = state * 48271 % 2147483647
            line.append("w%x" % (state % 5000))
        db.execute("INSERT INTO docs VALUES (?, ?, ?)", (number, number % 100, " ".join(line)))
    db.execute("INSERT INTO words (words) VALUES ('rebuild')")
    db.commit()
    db.close()
    os.rename(PATH + ".new", PATH)


if not os.path.exists(PATH):
    initialise()
db = sqlite3.connect(PATH, check_same_thread=False)
lock = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        with lock:
            row = db.execute("SELECT body FROM docs WHERE id = ?", (int(self.path[1:] or 7),)).fetchone()
        body = row[0].encode() if row else b""
        self.send_response(200 if row else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
