package demo

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/containerd/containerd/v2/pkg/archive"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// services are more applications, for the experiments with lazy starts: what
// people run, each the way its official image does.
var services = map[string]app{
	"nginx-official": {
		packages: []string{"nginx-light", "gettext-base"},
		setup:    nginxSetup,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Entrypoint: []string{"/docker-entrypoint.sh"},
			Cmd:          []string{"nginx", "-g", "daemon off;"},
			ExposedPorts: ports("80/tcp"), StopSignal: "SIGQUIT",
		},
	},
	"httpd": {
		packages: []string{"apache2"},
		setup: `ln -sf /dev/stdout /var/log/apache2/access.log
ln -sf /dev/stderr /var/log/apache2/error.log
echo 'ServerName localhost' > /etc/apache2/conf-enabled/name.conf
echo '<!doctype html><title>Dewpoint</title><h1>It serves.</h1>' > /var/www/html/index.html`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Cmd: []string{"apache2ctl", "-D", "FOREGROUND"},
			ExposedPorts: ports("80/tcp"), StopSignal: "SIGWINCH",
		},
	},
	"node": {
		packages: []string{"nodejs"},
		setup: `mkdir -p /srv
cat > /srv/server.js <<'JS'
const http = require('node:http');
const os = require('node:os');
http.createServer((req, res) => res.end(os.hostname() + ' serves\n')).listen(3000, '0.0.0.0');
JS`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv, "NODE_ENV=production"}, Cmd: []string{"node", "/srv/server.js"},
			ExposedPorts: ports("3000/tcp"), WorkingDir: "/srv",
		},
	},
	"java": {
		packages: []string{"default-jre-headless"},
		before:   "mkdir -p /usr/share/man/man1", // where it registers its alternatives
		setup:    javaSetup,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Cmd: []string{"java", "-cp", "/srv", "Web"},
			ExposedPorts: ports("8081/tcp"), WorkingDir: "/srv", // the exit status after SIGTERM is 143
		},
	},
	"mariadb": {
		packages: []string{"mariadb-server"},
		setup:    mariadbSetup,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Entrypoint: []string{"/entrypoint.sh"},
			Cmd:          []string{"mariadbd", "--user=mysql", "--bind-address=0.0.0.0"},
			ExposedPorts: ports("3306/tcp"),
		},
	},
}

// The entrypoint runs what lies in a directory of steps before the server:
// listening on IPv6 where there is any, and templates filled in from the
// environment.
const nginxSetup = `ln -sf /dev/stdout /var/log/nginx/access.log
ln -sf /dev/stderr /var/log/nginx/error.log
rm -f /var/www/html/*
echo '<!doctype html><title>Dewpoint</title><h1>It serves.</h1>' > /var/www/html/index.html
mkdir -p /docker-entrypoint.d /etc/nginx/templates
cat > /docker-entrypoint.sh <<'SH'
#!/bin/sh
set -e
if [ "$1" = nginx ]; then
	find /docker-entrypoint.d -type f -name '*.sh' | sort -V | while read -r step; do
		echo "entrypoint: $step"
		"$step"
	done
fi
exec "$@"
SH
cat > /docker-entrypoint.d/10-ipv6.sh <<'SH'
#!/bin/sh
site=/etc/nginx/sites-available/default
if [ ! -f /proc/net/if_inet6 ] && grep -q 'listen.*\[::\]' "$site"; then
	sed -i '/listen.*\[::\]/d' "$site"
fi
dpkg-query --show --showformat='${Conffiles}\n' nginx-common | grep -q sites-available/default || true
SH
cat > /docker-entrypoint.d/20-templates.sh <<'SH'
#!/bin/sh
names=$(printf '${%s} ' $(env | cut -d= -f1))
for template in /etc/nginx/templates/*.template; do
	[ -e "$template" ] || continue
	envsubst "$names" < "$template" > "/etc/nginx/conf.d/$(basename "$template" .template)"
done
SH
echo 'server_tokens off; # ${HOSTNAME}' > /etc/nginx/templates/tokens.conf.template
sed -i '/server_tokens/d' /etc/nginx/nginx.conf
chmod 755 /docker-entrypoint.sh /docker-entrypoint.d/*.sh`

// The compiler is there while the image is built, and in no layer.
const javaSetup = `mkdir -p /srv
cat > /tmp/Web.java <<'JAVA'
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.Executors;

public class Web {
	public static void main(String[] args) throws Exception {
		HttpServer server = HttpServer.create(new InetSocketAddress(8081), 0);
		server.createContext("/", exchange -> {
			byte[] answer = String.format("%s serves%n", Runtime.version()).getBytes(StandardCharsets.UTF_8);
			exchange.sendResponseHeaders(200, answer.length);
			exchange.getResponseBody().write(answer);
			exchange.close();
		});
		server.setExecutor(Executors.newCachedThreadPool());
		server.start();
	}
}
JAVA
before=$(dpkg-query --show --showformat='${Package}\n' | sort)
apt-get -qq install -y --no-install-recommends default-jdk-headless
javac -d /srv /tmp/Web.java
apt-get -qq purge -y default-jdk-headless $(dpkg-query --show --showformat='${Package}\n' 'openjdk-*-jdk-headless' 'default-jdk*')
apt-get -qq purge -y --autoremove
[ "$before" = "$(dpkg-query --show --showformat='${db:Status-Abbrev}${Package}\n' | sed -n 's/^ii //p' | sort)" ]`

// A new container makes its database first, as the official image does.
const mariadbSetup = `rm -rf /var/lib/mysql/* /var/log/mysql/*
mkdir -p /run/mysqld
chown mysql:mysql /run/mysqld /var/lib/mysql
cat > /entrypoint.sh <<'SH'
#!/bin/sh
set -e
if [ ! -d /var/lib/mysql/mysql ]; then
	mariadb-install-db --user=mysql --datadir=/var/lib/mysql --skip-test-db >/dev/null
fi
exec "$@"
SH
chmod 755 /entrypoint.sh`

//go:embed website/main.go
var websiteSource []byte

// website is the image of one static binary and nothing else.
var website = recipe{
	layers: func(ctx context.Context, b *builder) ([]layer, error) {
		dir, err := os.MkdirTemp(b.work, "website")
		if err != nil {
			return nil, err
		}
		tree := filepath.Join(dir, "tree")
		if err := errors.Join(os.Mkdir(tree, 0o755),
			os.WriteFile(filepath.Join(dir, "main.go"), websiteSource, 0o644)); err != nil {
			return nil, err
		}
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", filepath.Join(tree, "website"), "main.go")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GO111MODULE=off")
		if err := run(cmd); err != nil {
			return nil, fmt.Errorf("%w (the Go compiler must be in PATH)", err)
		}
		l, err := b.store.pack(ocispec.MediaTypeImageLayerGzip, gzip6, func(l *layerWriter) error {
			return archive.WriteDiff(ctx, l, "", tree)
		})
		return []layer{l}, err
	},
	config: ocispec.ImageConfig{Cmd: []string{"/website"}, ExposedPorts: ports("8080/tcp")},
}
