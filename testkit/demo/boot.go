package demo

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// bootFiles are the sources of the services below, each in a directory of the service's name.
//
//go:embed boot
var bootFiles embed.FS

// boots are services that differ in how they boot, for the experiments with
// checkpoints: they stand for those of Edge-ShareLaTeX, by which the thesis
// measured. Each serves only once it has booted, and all its processes are
// root's, so that machines without CAP_SYS_RESOURCE can checkpoint them.
//
//	realtime  node: pushes changes to editors over WebSockets
//	updater   node: replays a journal of changes
//	web       node: compiles a TypeScript project of 200 modules, then runs it
//	spelling  python: builds an index of misspellings from a list of words
//	docstore  python: makes its SQLite database and fills it
//	tracker   python: flask, numpy and pandas
//	chat      JVM: Spring Boot with an embedded Tomcat
//	mariadb   makes its database first
//	ferretdb  FerretDB over SQLite; makes its database first
//	clsi      LaTeX: makes the format, then compiles a document
//	nginx     a page of 5 kB
//	memory    Go: holds MEMORY_MB of data that compress to half
var boots = map[string]app{
	"nginx": {
		packages: []string{"nginx-light"},
		setup: `rm -f /var/www/html/* /etc/nginx/sites-enabled/* /etc/nginx/modules-enabled/*
head -c 3750 /dev/zero | base64 > /var/www/html/index.html
sed -i 's/^user .*/user root;/; s/worker_processes .*/worker_processes 2;/; s/access_log .*/access_log off;/; s/worker_connections .*/worker_connections 4096;/' /etc/nginx/nginx.conf
ln -sf /dev/stderr /var/log/nginx/error.log
echo 'server { listen 80 backlog=2048; root /var/www/html; }' > /etc/nginx/conf.d/page.conf`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Cmd: []string{"nginx", "-g", "daemon off;"},
			ExposedPorts: ports("80/tcp"), StopSignal: "SIGQUIT",
		},
	},
	"realtime": nodeService("realtime", "", "node", "/srv/server.js"),
	"updater": nodeService("updater", "node /srv/journal.js > /srv/journal.json && rm /srv/journal.js", "node",
		"/srv/server.js"),
	"web": nodeService("web",
		"node /srv/generate.js /srv/project && rm /srv/generate.js && chmod 755 /srv/start",
		"/srv/start"),
	"spelling": pythonService("spelling", "", "wamerican"),
	"docstore": pythonService("docstore", ""),
	"tracker":  pythonService("tracker", "", "python3-flask", "python3-numpy", "python3-pandas"),
	"chat": {
		before: "mkdir -p /usr/share/man/man1", packages: []string{"openjdk-17-jre-headless"}, files: springBoot,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Cmd: []string{"java", "-jar", "/srv/service.jar"},
			ExposedPorts: ports("8080/tcp"), WorkingDir: "/srv",
		},
	},
	"mariadb": {
		packages: []string{"mariadb-server"}, files: sources("mariadb"),
		setup: `rm -rf /var/lib/mysql/* /var/log/mysql/*
mkdir -p /run/mysqld
chown root:root /var/lib/mysql /run/mysqld
chmod 755 /srv/start`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Entrypoint: []string{"/srv/start"},
			Cmd: []string{"mariadbd", "--user=root", "--bind-address=0.0.0.0", "--skip-name-resolve",
				"--max-connect-errors=1000000000"},
			ExposedPorts: ports("3306/tcp"),
		},
	},
	"ferretdb": {
		files: ferretDB,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv, noMultipath}, Cmd: []string{"/srv/service"}, ExposedPorts: ports("27017/tcp"),
			WorkingDir: "/srv",
		},
	},
	"clsi": {
		packages: []string{"python3", "texlive-latex-base"}, files: sources("clsi"),
		setup: `rm -rf /var/lib/texmf/web2c`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv, "PYTHONUNBUFFERED=1"}, Cmd: []string{"python3", "/srv/app.py"},
			ExposedPorts: ports("8000/tcp"), WorkingDir: "/srv",
		},
	},
	"memory": {
		files: goProgram("memory"),
		config: ocispec.ImageConfig{
			Env: []string{pathEnv, noMultipath, "MEMORY_MB=1024"}, Cmd: []string{"/srv/service"},
			ExposedPorts: ports("8080/tcp"), WorkingDir: "/srv",
		},
	},
}

// noMultipath keeps Go programs from listening with MPTCP, which CRIU does not know.
const noMultipath = "GODEBUG=multipathtcp=0"

// BootNames are the images of the experiments with checkpoints.
func BootNames() []string {
	names := []string{"redis:1"}
	for _, name := range []string{"nginx", "realtime", "updater", "docstore", "spelling", "tracker", "chat",
		"ferretdb", "mariadb", "clsi", "web"} {
		names = append(names, name+":boot")
	}
	return names
}

func nodeService(name, setup string, cmd ...string) app {
	packages := []string{"nodejs"}
	if name == "web" {
		packages = append(packages, "node-typescript")
	}
	return app{packages: packages, files: sources(name), setup: setup, config: ocispec.ImageConfig{
		Env: []string{pathEnv, "NODE_ENV=production"}, Cmd: cmd, ExposedPorts: ports("3000/tcp"),
		WorkingDir: "/srv",
	}}
}

func pythonService(name, setup string, packages ...string) app {
	return app{packages: append([]string{"python3"}, packages...), files: sources(name), setup: setup,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv, "PYTHONUNBUFFERED=1"}, Cmd: []string{"python3", "/srv/app.py"},
			ExposedPorts: ports("8000/tcp"), WorkingDir: "/srv",
		}}
}

// sources puts a service's files into /srv.
func sources(name string) func(context.Context, string) error {
	return func(_ context.Context, dir string) error {
		return copySources(name, filepath.Join(dir, "srv"))
	}
}

func copySources(name, dir string) error {
	files, err := fs.Sub(bootFiles, "boot/"+name)
	if err != nil {
		return err
	}
	return os.CopyFS(dir, files)
}

// outside is where a service is built that its image holds only the result of.
func outside(name string, build func(dir string) (result string, err error), to string) error {
	dir, err := os.MkdirTemp("", "dewpoint-"+name+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := copySources(name, filepath.Join(dir, name)); err != nil {
		return err
	}
	result, err := build(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(result)
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, raw, 0o755))
}

// springBoot is built by the machine's Maven.
func springBoot(ctx context.Context, tree string) error {
	return outside("chat", func(dir string) (string, error) {
		cmd := exec.CommandContext(ctx, "mvn", "-q", "-B", "package")
		cmd.Dir = dir
		if err := run(cmd); err != nil {
			return "", fmt.Errorf("%w (Maven and a JDK of 17 or newer must be installed: scripts/install bench)", err)
		}
		return filepath.Join(dir, "target", "service.jar"), nil
	}, filepath.Join(tree, "srv", "service.jar"))
}

func goProgram(name string) func(context.Context, string) error {
	return func(ctx context.Context, tree string) error {
		return outside(name, func(dir string) (string, error) {
			return goBuild(ctx, dir, filepath.Join(dir, "main.go"), "GO111MODULE=off")
		}, filepath.Join(tree, "srv", "service"))
	}
}

func goBuild(ctx context.Context, dir, what string, env ...string) (string, error) {
	to := filepath.Join(dir, "service")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", to,
		what)
	cmd.Dir = dir
	cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod"), env...)
	if err := run(cmd); err != nil {
		return "", fmt.Errorf("%w (the Go compiler must be in PATH)", err)
	}
	return to, nil
}

const ferretDBModule = "github.com/FerretDB/FerretDB@v1.24.0"

// ferretDB is built in a copy of its module, with the dependencies that it names.
func ferretDB(ctx context.Context, tree string) error {
	return outside("ferretdb", func(dir string) (string, error) {
		download := exec.CommandContext(ctx, "go", "mod", "download", ferretDBModule)
		download.Env = append(os.Environ(), "GOFLAGS=-mod=mod")
		if err := run(download); err != nil {
			return "", err
		}
		cache, err := exec.CommandContext(ctx, "go", "env", "GOMODCACHE").Output()
		if err != nil {
			return "", err
		}
		path := strings.NewReplacer("F", "!f", "D", "!d", "B", "!b").Replace(ferretDBModule)
		src := filepath.Join(dir, "src")
		if err := run(exec.CommandContext(ctx, "cp", "-r", "--no-preserve=mode",
			filepath.Join(strings.TrimSpace(string(cache)), path), src)); err != nil {
			return "", err
		}
		// The module is published without the file that its releases write.
		if err := errors.Join(os.WriteFile(filepath.Join(src, "build", "version", "version.txt"), []byte("v1.24.0"),
			0o644),
			os.MkdirAll(filepath.Join(src, "cmd", "service"), 0o755),
			os.Rename(filepath.Join(dir, "main.go.txt"),
				filepath.Join(src, "cmd", "service", "main.go"))); err != nil {
			return "", err
		}
		return goBuild(ctx, src, "./cmd/service")
	}, filepath.Join(tree, "srv", "service"))
}
