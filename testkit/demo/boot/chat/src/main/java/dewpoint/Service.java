package dewpoint;

import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;

import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.PostMapping;
import org.springframework.web.bind.annotation.RequestBody;
import org.springframework.web.bind.annotation.RestController;

/** Keeps the messages of one chat in memory. */
@SpringBootApplication
@RestController
public class Service {
	public record Message(String from, String text) {}

	private final List<Message> messages = new CopyOnWriteArrayList<>(List.of(new Message("dewpoint", "welcome")));

	public static void main(String[] args) {
		SpringApplication.run(Service.class, args);
	}

	@GetMapping("/")
	public List<Message> list() {
		return messages;
	}

	@PostMapping("/")
	public Message say(@RequestBody Message message) {
		messages.add(message);
		return message;
	}
}
