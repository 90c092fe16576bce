import java.io.IOException;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.SplittableRandom;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;

/** Answers each connection with what its generators give next. */
public final class Draw {
	public static void main(String[] args) throws IOException {
		ServerSocket server = new ServerSocket(Integer.getInteger("port"));
		line();
		while (true) {
			Socket client = server.accept();
			client.getOutputStream().write(line().getBytes());
			client.close();
		}
	}

	private static String line() {
		return "math=" + Math.random() + " local=" + ThreadLocalRandom.current().nextLong()
			+ " split=" + new SplittableRandom().nextLong() + " uuid=" + UUID.randomUUID();
	}
}
