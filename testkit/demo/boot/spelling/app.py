"""Corrects words: builds an index of all forms of each word with one letter
left out, then serves suggestions."""
import collections
import http.server
import urllib.parse


def shorter(word):
    return {word[:i] + word[i + 1:] for i in range(len(word))} | {word}


index = collections.defaultdict(list)
with open("/usr/share/dict/words", encoding="utf-8") as words:
    for line in words:
        for form in shorter(line.strip()):
            index[form].append(line.strip())


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        word = urllib.parse.unquote(self.path[1:]) or "speling"
        found = sorted({w for form in shorter(word) for w in index.get(form, ())})
        body = "\n".join(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
