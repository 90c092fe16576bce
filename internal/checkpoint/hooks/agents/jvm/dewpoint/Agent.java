package dewpoint;

import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.lang.instrument.Instrumentation;
import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.nio.file.Files;
import java.security.SecureRandom;
import java.util.Collections;
import java.util.HashMap;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Makes a restored JVM draw random numbers of its own. A daemon thread waits at Dewpoint's bell. When the
 * container's generation has changed, the process is a clone: the thread replaces the static seeds of
 * java.base, and reports.
 *
 * ../../../mkjar compiles this file for Java 8. What Java 9 added is called by reflection.
 */
public final class Agent extends Thread {
	private static String state;
	private static String report;
	private static String seen;
	private static SecureRandom source;

	/** Reports this process, then begins to wait. What is wrong here stops no application. */
	public static void premain(String args, Instrumentation instrumentation) {
		try {
			state = System.getenv("DEWPOINT_STATE");
			if (state == null) {
				return;
			}
			seen = generation();
			report = "agents/jvm-" + new File("/proc/self").getCanonicalFile().getName();
			open(instrumentation);
			source = new SecureRandom();
			report("ok");
			Agent agent = new Agent();
			agent.setDaemon(true);
			agent.setName("dewpoint");
			agent.start();
		} catch (Throwable t) {
			System.err.println("dewpoint: no agent: " + t);
		}
	}

	/** Opens java.lang and java.util to this class. Before Java 9 nothing is closed. */
	private static void open(Instrumentation instrumentation) {
		try {
			Method getModule = Class.class.getMethod("getModule");
			Class<?> module = Class.forName("java.lang.Module");
			Set<?> us = Collections.singleton(getModule.invoke(Agent.class));
			Map<String, Set<?>> opens = new HashMap<String, Set<?>>();
			opens.put("java.lang", us);
			opens.put("java.util", us);
			opens.put("java.util.concurrent", us);
			Instrumentation.class
				.getMethod("redefineModule", module, Set.class, Map.class, Map.class, Set.class, Map.class)
				.invoke(instrumentation, getModule.invoke(Object.class), Collections.emptySet(),
					Collections.emptyMap(), opens, Collections.emptySet(), Collections.emptyMap());
		} catch (Throwable t) {
			// reseed says what it cannot reach
		}
	}

	/** Waits until the bell is rung: its opening ends when a writer comes. */
	@Override
	public void run() {
		try {
			while (true) {
				new FileInputStream(file("bell")).close();
				String now = generation();
				if (!now.equals(seen)) {
					seen = now;
					report(reseed());
				}
			}
		} catch (Throwable t) {
			// the container has no state any more
		}
	}

	private static File file(String name) {
		return new File(state, name);
	}

	private static String generation() throws IOException {
		return new String(Files.readAllBytes(file("generation").toPath())).trim();
	}

	/** Writes "GENERATION RESULT" into the process's file, all or nothing. */
	private static void report(String result) throws IOException {
		File draft = file(report + ".tmp");
		Files.write(draft.toPath(), (seen + " " + result).getBytes());
		draft.renameTo(file(report));
	}

	/** Gives every seed that is shared by the whole process a new value. */
	private static String reseed() {
		try {
			drain();
			((Random) shared("java.lang.Math$RandomNumberGeneratorHolder", "randomNumberGenerator")).setSeed(fresh());
			renew("java.util.Random", "seedUniquifier");
			renew("java.util.SplittableRandom", "defaultGen");
			renew("java.util.concurrent.ThreadLocalRandom", "seeder");
			renewThreads();
			return "ok";
		} catch (Throwable t) {
			return t.toString();
		}
	}

	/**
	 * Uses up what the default SecureRandom keeps: up to 64 KiB of the kernel's bytes, for 100 ms of the wall
	 * clock, which may have been set back.
	 */
	private static void drain() {
		source.nextBytes(new byte[128 << 10]);
	}

	private static long fresh() {
		return source.nextLong();
	}

	private static Object shared(String type, String name) throws ReflectiveOperationException {
		Field field = Class.forName(type).getDeclaredField(name);
		field.setAccessible(true);
		return field.get(null);
	}

	private static void renew(String type, String name) throws ReflectiveOperationException {
		((AtomicLong) shared(type, name)).set(fresh());
	}

	/** ThreadLocalRandom keeps a seed in each thread. */
	private static void renewThreads() throws ReflectiveOperationException {
		Field seed = Thread.class.getDeclaredField("threadLocalRandomSeed");
		seed.setAccessible(true);
		for (Thread t : Thread.getAllStackTraces().keySet()) {
			seed.setLong(t, fresh());
		}
	}
}
