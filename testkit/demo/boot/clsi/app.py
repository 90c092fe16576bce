"""Compiles LaTeX: makes the format when it starts and compiles a document with
it, then compiles what it is sent. A request without a document is answered
with the size of the first one's result."""
import http.server
import os
import subprocess
import tempfile

FORMAT = "/srv/format"
FIRST = r"""\documentclass{article}\begin{document}\tableofcontents
\section{One}$\int_0^1 x^2\,dx = \frac13$\section{Two}Text.\end{document}"""


def make_format():
    os.makedirs(FORMAT, exist_ok=True)
    subprocess.run(["pdftex", "-ini", "-etex", "-interaction=batchmode", "-jobname=pdflatex", "-progname=pdflatex",
                    "*pdflatex.ini"], cwd=FORMAT, check=True, stdout=subprocess.DEVNULL)


def compile_document(source):
    with tempfile.TemporaryDirectory() as work:
        with open(os.path.join(work, "main.tex"), "w", encoding="utf-8") as f:
            f.write(source)
        for _ in range(2):
            subprocess.run(["pdftex", "-fmt=" + FORMAT + "/pdflatex.fmt", "-progname=pdflatex", "-interaction=batchmode",
                            "main.tex"], cwd=work, check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(work, "main.pdf"), "rb") as f:
            return f.read()


make_format()
first = compile_document(FIRST)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(str(len(first)).encode())

    def do_POST(self):
        self.answer(compile_document(self.rfile.read(int(self.headers["Content-Length"])).decode()))

    def log_message(self, *args):
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
